"""Which adapters vLLM holds in this process, and which of them serves."""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlora_rl.contracts import AdapterSlots
from qlora_rl.engine import compat
from qlora_rl.engine.worker.parallel import held_digests
from qlora_rl.errors import EngineBrokenError, SyncError, VersionGoneError
from qlora_rl.versions import Versions

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Served:
    """The adapter that serves, or the one before it.

    Attributes:
        version: that the trainer gave it.
        request: vLLM's LoRARequest.
        salt: part of the prefix-cache key of every request; no two pushes have the same, whatever vLLM calls them.
        recover: gives a PEFT directory of it.
    """

    version: int
    request: Any
    salt: str
    recover: Callable[[], Path]


class Adapters:
    """Loads, lends, serves and drops; the engine hands in its `vllm.LLM`, which a rebuild replaces.

    Args:
        max_rank: R that the slots are made for.
        numbers: of adapters and pushes, shared by all that hold adapters in one engine.
        slots: of vLLM's that are this object's own; `None` where it has all of them, and vLLM lets go of the one that
            was used least recently.
    """

    def __init__(self, max_rank: int, numbers: Iterator[int] | None = None, slots: int | None = None) -> None:
        self.max_rank, self.slots = max_rank, slots
        self._numbers = numbers or itertools.count(1)
        self._held: list[int] = []  # vLLM's numbers of what is in the slots, where they are this object's own
        self.version = 0
        self._before_sleep: Mapping[str, str] = {}
        self._live: Versions[Served] = Versions()  # the one before, as long as vLLM holds it
        self.is_lost, self._why_lost = False, ""
        self._slots: AdapterSlots | None = None
        self._slot_requests: tuple[Any, ...] = ()

    @property
    def served(self) -> Served | None:
        """The adapter that serves; `None` is the bare base."""
        return self._live.newest

    @property
    def numbers(self) -> tuple[int, ...]:
        """vLLM's numbers of what is in the slots that are this object's own."""
        return tuple(self._held)

    def overwritten(self) -> tuple[int, ...]:
        """vLLM's numbers of those whose places the next push takes."""
        is_lent = self._slots is not None and self._slots.is_valid() and self.served is not None
        return tuple(each for each in self._held if not is_lent or each != self.served.request.lora_int_id)

    def load(
        self, llm: LLM, directory: Path, version: int, let_go: Callable[[int], None] = lambda adapter: None
    ) -> None:
        """Serve a PEFT directory; see `LocalEngine.load_adapter`."""
        self._make_room(llm, 1, let_go)
        request = self._add(llm, directory, version, f"policy-v{version}")
        self._serve(request, version, lambda: directory)

    def lend(self, llm: LLM, directory: Path, let_go: Callable[[int], None]) -> AdapterSlots:
        """Load a PEFT directory twice, and give out the buffers of both; see `LocalEngine.lend_slots`.

        `let_go` returns when nobody samples, or can begin to, with an adapter of that number.
        """
        requests: list[Any] = []
        self._make_room(llm, 2, let_go)
        rank = int(json.loads((directory / "adapter_config.json").read_text())["r"])
        try:
            for slot in range(2):
                requests.append(self._add(llm, directory, self.version + 1, f"policy-slot-{slot}"))
            ids = [request.lora_int_id for request in requests]
            places = tuple(llm.collective_rpc("qlora_lend_adapter", args=(key, rank))[0] for key in ids)
        except BaseException:
            for request in requests:
                self._forget(llm, request.lora_int_id)
            self._keep_serving(llm)
            raise
        engine = weakref.ref(llm)  # whoever holds slots must not keep an engine alive that was given up

        def is_valid() -> bool:
            held = engine()
            return self._slots is slots and held is not None and compat.holds_adapters(held, ids)

        self._slots = slots = AdapterSlots(places, is_valid, lambda slot: let_go(ids[slot]))
        self._live = self._live.without_before()  # they have taken its place
        # What is written into a slot is in no directory: should vLLM lose it, it must fail, not read an old version.
        self._slot_requests = tuple(_without_path(request) for request in requests)
        return slots

    def serve_slot(self, slots: AdapterSlots, index: int, version: int, recover: Callable[[], Path]) -> None:
        """Serve what is in a slot; see `LocalEngine.serve_slot`."""
        if not slots.is_valid():
            raise SyncError(
                f"serving adapter version={version} out of slot {index}: the engine has taken its slots back. Push "
                "again."
            )
        self._serve(self._slot_requests[index], version, recover)

    def drop(self, llm: LLM) -> None:
        """Serve the bare base."""
        for number in self.numbers or (() if self.served is None else (self.served.request.lora_int_id,)):
            self._forget(llm, number)
        self._live, self.version, self.is_lost, self._slots = Versions(), 0, False, None

    def load_again(self, llm: LLM) -> None:
        """Load what serves again; without its directory the engine must not go on as the bare base."""
        if self.served is None:
            return
        recover, self._live, self._slots = self.served.recover, Versions(), None
        for number in self.numbers:
            self._forget(llm, number)
        self.withdraw("it was lost when the engine was rebuilt")
        try:
            directory = recover()
        except Exception as error:
            raise EngineBrokenError(
                f"rebuilding the engine: adapter version={self.version} was not kept ({error}). Push the adapter "
                "again, or call drop_adapter() to go on with the bare base."
            ) from error
        if directory.is_dir():
            self.load(llm, directory, self.version)

    def before_sleep(self, llm: LLM) -> None:
        """Note what serves."""
        self._before_sleep = self.held(llm, self.max_rank)

    def after_wake(self, llm: LLM) -> None:
        """Load what serves again where waking has lost it (vllm#53888); otherwise it and the slots are as they were."""
        if self.held(llm, self.max_rank) != self._before_sleep:
            self.load_again(llm)

    def held(self, llm: LLM, rank: int) -> Mapping[str, str]:
        """Digests of what the serving slot holds."""
        if self.served is None:
            return {}
        return held_digests(llm.collective_rpc("qlora_held_adapter", args=(self.served.request.lora_int_id, rank)))

    def withdraw(self, reason: str) -> None:
        """Serve nothing until the next push."""
        self.is_lost, self._why_lost = True, reason

    def _keep_serving(self, llm: LLM) -> None:
        """An adapter that was rejected may have taken the place of the one that serves: load that one again."""
        if self.served is not None and not compat.holds_adapters(llm, [self.served.request.lora_int_id]):
            self.load_again(llm)

    def reject_lost(self) -> None:
        """Raise where the adapter that should serve is gone."""
        if self.is_lost:
            raise EngineBrokenError(
                f"generating: adapter version={self.version}: {self._why_lost}. Push the adapter again, or call "
                "drop_adapter() to go on with the bare base."
            )

    def _add(self, llm: LLM, directory: Path, version: int, name: str) -> Any:
        from vllm.lora.request import LoRARequest

        # A number that vLLM has never seen: it would take one that it knows for the adapter that it has loaded already.
        number = next(self._numbers)
        request = LoRARequest(name, number, str(directory))
        try:
            llm.llm_engine.add_lora(request)
            lost = compat.unreached_modules(llm, number)
        except BaseException as error:
            self._forget(llm, number)
            self._keep_serving(llm)
            if not isinstance(error, Exception):
                raise
            raise SyncError(
                f"loading adapter version={version} into vLLM: {str(error).rstrip('.')}. Version {self.version} goes "
                "on serving."
            ) from error
        if lost:
            self._forget(llm, number)
            self._keep_serving(llm)
            raise SyncError(
                f"loading adapter version={version} into vLLM: no layer of the engine multiplies with "
                f"{', '.join(lost[:4])}{' …' if len(lost) > 4 else ''}; it would have been left out without a word. "
                f"Version {self.version} goes on serving. Leave these modules out of target_modules.",
                reasons=lost,
                module=lost[0],
            )
        if self.slots is not None:
            self._held.append(number)
        return request

    def _make_room(self, llm: LLM, count: int, let_go: Callable[[int], None]) -> None:
        """Free some of the slots that are this object's own: vLLM would take the place of another's adapter."""
        while self.slots is not None and len(self._held) + count > self.slots:
            let_go(self._held[0])
            self._forget(llm, self._held[0])

    def _forget(self, llm: LLM, number: int) -> None:
        """Take an adapter that will not serve out of vLLM, if it got that far."""
        with contextlib.suppress(ValueError):
            self._held.remove(number)
        with contextlib.suppress(Exception):
            llm.llm_engine.remove_lora(number)

    def find(self, version: int, serving: int) -> Served | None:
        """What to sample with as `version`, where the engine serves `serving`; `None` is the bare base.

        Raises:
            VersionGoneError: it is neither the one that serves nor the one before, or that was overwritten.
        """
        if version == serving:
            return self.served
        before = self._live.before
        if before is None or before.version != version:
            held = "" if before is None else f" and version={before.version}"
            raise VersionGoneError(
                f"generating: version={version} is asked for, and the engine holds version={serving}{held}. Generate "
                "again, with what serves now."
            )
        return before

    def forget_before(self, adapter: int) -> None:
        """The version before can no longer be sampled with, where this is its adapter."""
        before = self._live.before
        if before is not None and before.request.lora_int_id == adapter:
            self._live = self._live.without_before()

    def _serve(self, request: Any, version: int, recover: Callable[[], Path]) -> None:
        is_same = self.served is not None and self.served.request.lora_int_id == request.lora_int_id
        live = self._live.with_newest(Served(version, request, f"policy-{next(self._numbers)}", recover))
        self._live = live.without_before() if is_same else live
        self.version, self.is_lost = version, False


def _without_path(request: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(request.lora_name, request.lora_int_id, f"/written-in-place/{request.lora_name}")
