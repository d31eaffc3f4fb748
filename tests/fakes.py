"""Engines elsewhere, in this process: `Direct`, the line to an actor, and `Here`, one with faults on demand."""

import threading
import time
from dataclasses import replace

from qlora_rl.engine.fake import FakeEngine
from qlora_rl.engine.fleet.ray_actor import ActorEngine
from qlora_rl.errors import EngineBrokenError, VersionGoneError


class Direct:
    """The line to an `ActorEngine` of this process.

    Args:
        base: directory that the engine is told.
        make: makes the engine of it.
    """

    url, way, piece_bytes, cuts, actor = "here", "object_store", 2**40, 0, None

    def __init__(self, base, make):
        self.base, self.make = base, make
        self.start_again()

    def start_again(self):
        """As a process that was started anew: it holds nothing."""
        if self.actor is not None:
            self.actor.close()
        self.actor = ActorEngine(str(self.base), {}, self.make)

    def ask(self, method, path, body, start):
        return self.actor.ask(start, method, path, body).checked(start)

    def computes(self, timeout_s, *, bare):
        return True

    def close(self):
        self.actor.close()


class Here(Direct):
    """To an engine that samples with two versions.

    Args:
        name: of the engine.
        model: of its own.
    """

    def __init__(self, name, model):
        self.url, self.pause_s = name, 0.0  # that it takes for each prompt, asleep
        self.sampled = self.calls = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        super().__init__("base", lambda _: TwoVersions(model))

    def start_again(self):
        self.dies_at = None
        super().start_again()
        self.is_dead = False  # last: until then the one before would answer once more, and be taken for a third one

    def ask(self, method, path, body, start):
        if path != "/generate":
            self._live()
            return super().ask(method, path, body, start)
        self._live()
        self.calls += 1
        time.sleep(self.pause_s * len(body["prompts"]))
        assert self.may_answer.wait(60)
        self.is_dead |= self.calls == self.dies_at
        self._live()
        answer = super().ask(method, path, body, start)
        self.sampled += len(body["prompts"])
        return answer

    def _live(self):
        if self.is_dead:
            raise EngineBrokenError(f"asking {self.url}: it is dead.")

    def computes(self, timeout_s, *, bare):
        return not self.is_dead

    def cancel(self):
        pass


class TwoVersions(FakeEngine):
    """One request at a time, with the version that serves or the one before it."""

    def __init__(self, model):
        self._turn, self._both, self._newest = threading.RLock(), {0: {}}, 0
        super().__init__(model, max_model_length=64)

    @property
    def version(self):
        return self._newest

    @version.setter
    def version(self, version):
        """`FakeEngine` notes what it samples with, which may be the version before."""

    def capabilities(self):
        return replace(super().capabilities(), holds_two=True)

    def load_adapter(self, directory, version):
        with self._turn:
            self._both = {self._newest: self._both[self._newest], version: self._read(directory, version)}
            self._newest = version
            self._serve(self._both[version], version)

    def drop_adapter(self):
        with self._turn:
            super().drop_adapter()
            self._both, self._newest = {0: {}}, 0

    def generate(self, prompts, sampling=None, *, places=None, version=None):
        with self._turn:
            version = self._newest if version is None else version
            if version not in self._both:
                raise VersionGoneError(f"generating: version={version} is no longer held.")
            self._serve(self._both[version], version)
            try:
                return replace(super().generate(prompts, sampling, places=places), version=version)
            finally:
                self._serve(self._both[self._newest], self._newest)

    def score(self, sequences, *, bare=False):
        with self._turn:
            return super().score(sequences, bare=bare)

    def held_adapter(self, rank):
        with self._turn:  # not of the version that another thread samples with
            return super().held_adapter(rank)
