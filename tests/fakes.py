"""Replicas of a fleet in this process: `FakeEngine` behind a lock, two versions at once, faults on demand."""

import threading
import time
from dataclasses import replace

from qlora_rl.adapter.store import unpack_adapter
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.errors import EngineBrokenError, VersionGoneError


class Here:
    """A replica whose process is this one.

    Args:
        name: of the replica.
        model: of its own.
        pause_s: that it takes for each prompt, asleep.
    """

    def __init__(self, name, model, *, pause_s=0.0):
        self.url, self.timeout_s, self.wait_s, self.pause_s = name, 60.0, 0.0, pause_s
        self.engine, self.model = FakeEngine(model, max_model_length=64), model
        self.base = self.engine.describe_base().digest
        self.found, self.incarnation, self.sampled, self.calls = (0, ""), 1, 0, 0
        self.dies_at, self.is_dead = None, False
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._lock = threading.RLock()
        self._held, self.version, self.pushed = {0: {}}, 0, None

    @property
    def start(self):
        return f"{self.url}-{self.incarnation}"

    def start_again(self):
        """As a process that was started anew: it holds nothing."""
        self.incarnation += 1
        self._held, self.version, self.pushed, self.is_dead, self.dies_at = {0: {}}, 0, None, False, None

    def _live(self):
        if self.is_dead:
            raise EngineBrokenError(f"asking {self.url}: it is dead.")

    def is_there(self, timeout_s):
        return not self.is_dead

    def wake(self):
        self._live()

    def capabilities(self):
        return replace(
            self.engine.capabilities(), takes_in_place=False, takes_bytes=True, can_sleep=False, holds_two=True
        )

    def describe_base(self):
        self._live()
        return self.engine.describe_base()

    def repair_base(self):
        return {}

    def generate(self, prompts, sampling, *, places=None, version=None):
        self._live()
        self.calls += 1
        time.sleep(self.pause_s * len(prompts))
        assert self.may_answer.wait(60)
        if self.calls == self.dies_at:
            self.is_dead = True
        self._live()
        with self._lock:
            version = self.version if version is None else version
            self._serve(version)
            rollout = self.engine.generate(prompts, sampling, places=places)
            self.sampled += len(prompts)
            return rollout

    def _serve(self, version):
        if version not in self._held:
            raise VersionGoneError(f"generating: version={version} is no longer held by {self.url}.")
        self.engine._serve(self._held[version], version)

    def score(self, sequences, *, bare=False):
        self._live()
        with self._lock:
            self._serve(self.version)
            return self.engine.score(sequences, bare=bare)

    def held_adapter(self, rank):
        self._live()
        with self._lock:
            self._serve(self.version)
            return self.engine.held_adapter(rank)

    def note_canary(self, difference):
        pass

    def claim(self, *, force=False):
        pass

    def load_packed(self, blob, version):
        self._live()
        with self._lock:
            before = {self.version: self._held[self.version]}
            self._held = before | {version: unpack_adapter(blob).tensors}
            self.version, self.pushed = version, (blob, version)

    def load_adapter(self, directory, version):
        raise NotImplementedError

    def drop_adapter(self):
        self._live()
        with self._lock:
            self._held, self.version, self.pushed = {0: {}}, 0, None

    def cancel(self):
        pass

    def close(self):
        self.engine.close()
