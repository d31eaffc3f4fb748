"""`Adapters`: many LoRA adapters on one verified base, trained and sampled at once by calls, without a trainer.

The base is in memory once: vLLM's tensors, which the trainer's side borrows. Each adapter has weights, gradients and
AdamW state of its own on that side, and a lane of the engine (`LocalEngine.lane`) on the other.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from qlora_rl.adapter.directory import adapter_in
from qlora_rl.adapter.export import read_adapter
from qlora_rl.adapter.inspected import shorten_lora
from qlora_rl.adapter.load import make_lora
from qlora_rl.adapter.several import LoraSet, linear_targets, stored_config
from qlora_rl.adapter.store import CONFIG, WEIGHTS, AdapterStore, write_origin
from qlora_rl.base.attention.attend import without_masks
from qlora_rl.base.checkpoint import load_base, open_base
from qlora_rl.contracts import AdapterBundle, Rollout, SamplingSpec, SyncReport
from qlora_rl.engine.local import LocalEngine, borrow_base
from qlora_rl.errors import ConfigConflictError, EngineClosedError, EngineUnsupportedError
from qlora_rl.sync.base_check import verify_base
from qlora_rl.sync.canary import Canary, compare_held
from qlora_rl.sync.forward import as_trained
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.sync.shared_base import SharedBase
from qlora_rl.sync.strategies import AdapterSync
from qlora_rl.train.scoring.logprobs import use_fused_head
from qlora_rl.train.scoring.losses import TokenLoss, TrainingRow
from qlora_rl.train.scoring.padding import remove_padding, row_inputs

CustomLoss = Callable[[Sequence[TrainingRow], list[torch.Tensor]], torch.Tensor]
_STATE = "qlora_adapters.json"


@dataclass(frozen=True)
class Passed:
    """What a pass over rows gave.

    Attributes:
        loss: summed over all tokens of all rows.
        logprobs: of the targets of each row, before any step that follows.
    """

    loss: float
    logprobs: list[list[float]]


@dataclass(eq=False)
class _Held:
    """One adapter: its name in the LoraSet, its lane and what pushes to it."""

    key: str
    lane: LocalEngine
    sync: AdapterSync
    steps: int = 0


@dataclass(frozen=True)
class _Saved:
    """A saved adapter; another one, where its files were written again."""

    directory: Path
    files: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, directory: Path) -> _Saved:
        found = [file.stat() for name in (CONFIG, WEIGHTS) if (file := directory / name).exists()]
        return cls(directory, tuple((about.st_mtime_ns, about.st_size, about.st_ino) for about in found))


@dataclass(eq=False)
class _Guest:
    """A lane for saved adapters, what it is to hold, what it holds (under `lock`), and who reads it."""

    lane: LocalEngine
    wanted: _Saved | None = None
    loaded: _Saved | None = None
    published: Path | None = None
    readers: int = 0
    used: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False)
class _Ticket:
    """Somebody who waits for a saved adapter, and at last the guest that holds it."""

    saved: _Saved
    guest: _Guest | None = None


class Adapters:
    """Many LoRA adapters on one base.

    ::

        with Adapters(prepare_base("Qwen/Qwen3-0.6B")) as adapters:
            adapters.create("first", rank=16, seed=0)
            adapters.push("first")
            rollout = adapters.sample({"first": prompts}, max_tokens=64)["first"]
            sampled = zip(prompts, rollout.completion_ids, rollout.logprobs, advantages)
            rows = [TrainingRow.of(*each) for each in sampled]
            adapters.forward_backward("first", rows, "importance_sampling")
            adapters.optim_step("first", learning_rate=1e-4)

    Several threads may sample, and one of them train, at the same time.

    Args:
        base: directory made by `prepare_base`.
        max_adapters: that are held at once.
        max_saved: saved adapters that are sampled from at once (`sample_saved`).
        max_rank: of an adapter.
        tokens: of a micro-batch: rows are computed one behind the other, without padding, as many as fit.
        canary_every: each so-many-th push of an adapter is scored by both sides; its bytes are compared at every push.
        gradient_checkpointing: compute layers again in the backward pass instead of keeping what they made.
        share_base: False holds the base twice, for one that vLLM has packed away (16 or 32 bits on a CPU).
        engine_options: of `LocalEngine`: max_model_length, max_num_seqs, ...

    Attributes:
        tokenizer: the base's; stays when the adapters are closed.

    Raises:
        BaseMismatchError: vLLM holds another base than was written.
        EngineUnsupportedError, CannotShareError: the base cannot be served, or not shared.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        *,
        max_adapters: int = 4,
        max_saved: int = 2,
        max_rank: int = 32,
        tokens: int = 4096,
        canary_every: int = 4,
        gradient_checkpointing: bool = False,
        share_base: bool = True,
        **engine_options: Any,
    ) -> None:
        self.max_adapters, self.max_rank, self.tokens = max_adapters, max_rank, tokens
        self._canary_every = canary_every
        self._held: dict[str, _Held] = {}
        self._training, self._guests_changed = threading.RLock(), threading.Condition()
        self._waiting: list[_Ticket] = []  # for a guest; the first one is served first
        self._made = self._used = 0
        self._shared: SharedBase | None = None
        self._calibrated: dict[str, Any] = {}
        self.engine = LocalEngine(
            base, max_lora_rank=max_rank, max_loras=2 * max_adapters + max_saved, **engine_options
        )
        try:
            self.tokenizer = self.engine.tokenizer
            self._store = AdapterStore()
            self.base = open_base(base, verify=False)
            model = borrow_base(self.engine) if share_base else load_base(self.base)
            verify_base(model, self.engine)
            model.requires_grad_(False)
            use_fused_head(model)
            self.why_padded = remove_padding(model)
            if gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
            self._engine_dtype = getattr(torch, self.engine.capabilities().adapter_dtype)
            self._vocabulary = model.get_input_embeddings().weight.shape[0]
            self._autocast = torch.bfloat16 if model.dtype == torch.bfloat16 else None
            self._loras = LoraSet(model)
            del model  # a frame that somebody keeps, as tracebacks do, would keep the base lent
            self._guests = [_Guest(self.engine.lane(slots=1)) for _ in range(max_saved)]
        except BaseException:
            self.engine.close(force=True)
            raise

    @property
    def max_model_length(self) -> int:
        """Tokens of a row, and of prompt plus completion."""
        return self.engine.capabilities().max_model_length

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._held))

    def create(
        self,
        name: str,
        *,
        rank: int = 16,
        alpha: float = 32.0,
        seed: int | None = None,
        attention: bool = True,
        mlp: bool = True,
    ) -> None:
        """Make an adapter that changes nothing yet.

        Args:
            alpha: its product is scaled by `alpha / rank`.
            seed: of its A matrices.
            attention, mlp: which linears it is on; never the embeddings or the output head.

        Raises:
            ConfigConflictError: the name is taken, or the rank is not between 1 and `max_rank`.
            EngineUnsupportedError: `max_adapters` are held.
        """
        rank, alpha = operator.index(rank), float(alpha)
        self._check_rank(rank)
        if not (attention or mlp):
            raise ConfigConflictError("creating an adapter: it is on no linears. Use attention, mlp, or both.")
        self._check_open()
        targets = linear_targets(self._loras.base, attention=attention, mlp=mlp)
        self._put(name, make_lora({"r": rank, "lora_alpha": alpha, "target_modules": targets}), seed)

    def open(self, name: str, directory: str | os.PathLike[str], *, optimizer: bool = True) -> None:
        """Make an adapter like one that `save` has written, with its weights and the state of its optimizer.

        Raises:
            AdapterRejectedError, ConfigConflictError, EngineUnsupportedError: as `load` and `create`.
        """
        self._check_open()
        path = self._readable(directory)
        config = stored_config(path)
        self._check_rank(config.r)
        with self._training:
            self._put(name, config, 0)
            try:
                self._load(name, path, optimizer=optimizer)
            except BaseException:
                self.drop(name)
                raise

    def _check_rank(self, rank: int) -> None:
        if not 1 <= rank <= self.max_rank:
            raise ConfigConflictError(
                f"creating an adapter: rank={rank} is not between 1 and max_rank={self.max_rank}. Use another rank, or "
                "make Adapters with a larger max_rank."
            )

    def _check_open(self) -> None:
        if self._loras.base is None:
            raise EngineClosedError("creating an adapter: these Adapters were closed. Make new ones.")

    def _put(self, name: str, config: Any, seed: int | None) -> None:
        with self._training:
            if name in self._held:
                raise ConfigConflictError(
                    f"creating an adapter: there is one named {name!r} already. Drop it, or use another name."
                )
            if len(self._held) >= self.max_adapters:
                raise EngineUnsupportedError(
                    f"creating an adapter: {len(self._held)} are held, and max_adapters={self.max_adapters}. Drop one, "
                    "or make Adapters with a larger max_adapters."
                )
            self._made += 1
            key = f"a{self._made}"
            is_first = self._loras.model is None
            with self.engine.paused():
                self._loras.add(key, config, seed)
            shorten_lora(self._loras.model)
            lane: LocalEngine | None = None
            try:
                if is_first or self._shared is None:
                    self._shared = SharedBase.of(self._loras.model)
                self._loras.activate(key)
                lane = self.engine.lane()
                canary = Canary(self._loras.model, lane, every=self._canary_every, autocast=self._autocast)
                if self._calibrated:  # of the bare base, which all have
                    canary.restore(self._calibrated)
                else:
                    canary.calibrate()
                    self._calibrated = canary.state()
                sync = AdapterSync(self._loras.model, lane, InPlaceTransport(), canary, self._shared)
            except BaseException:
                self._loras.remove(key)
                if lane is not None:
                    lane.close()
                raise
            self._held[name] = _Held(key, lane, sync)

    def drop(self, name: str, *, wait: bool = True) -> None:
        """Forget an adapter, once what is sampled from it is done.

        Args:
            wait: False ends what is sampled from it, with RolloutCancelledError.
        """
        with self._training:
            held = self._of(name)
            del self._held[name]
            try:
                held.lane.close(force=not wait)
            finally:  # what is in memory goes, also where the engine has failed
                held.sync.transport.close()
                self._loras.remove(held.key)
                if self._loras.model is None:
                    self._shared = None

    def forward(self, name: str, rows: Sequence[TrainingRow], loss: str = "cross_entropy", **config: float) -> Passed:
        """Loss and logprobs, without gradients; errors as those of `forward_backward`."""
        return _last(self.passes(name, rows, TokenLoss(loss, config), backward=False))

    def forward_backward(
        self, name: str, rows: Sequence[TrainingRow], loss: str | CustomLoss = "cross_entropy", **config: float
    ) -> Passed:
        """Add the gradients of a loss to those of the adapter.

        Args:
            rows: no longer than `max_model_length` each.
            loss: "cross_entropy", "importance_sampling", "ppo", "cispo" or "dro", as Tinker defines them: sums over
                tokens; or a function of the rows and the logprobs of each (tensors [T] with gradients, on the CPU),
                which costs a second forward pass.
            config: of the loss, see `TokenLoss`.

        Raises:
            ConfigConflictError: a row or a setting is wrong; the gradients are as before.
        """
        if isinstance(loss, str):
            return _last(self.passes(name, rows, TokenLoss(loss, config)))
        with self._training:
            return self._custom(name, rows, loss)

    def _custom(self, name: str, rows: Sequence[TrainingRow], loss: CustomLoss) -> Passed:
        linear = TokenLoss("cross_entropy")
        plain = [TrainingRow(row.tokens, row.targets, {"weights": [0.0] * len(row.targets)}) for row in rows]
        first = _last(self.passes(name, plain, linear, backward=False))
        leaves = [torch.tensor(values, dtype=torch.float32, requires_grad=True) for values in first.logprobs]
        total = loss(rows, leaves)
        found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        slopes = [
            TrainingRow(row.tokens, row.targets, {"weights": (-slope).tolist()})
            for row, slope in zip(rows, found, strict=True)
        ]
        _last(self.passes(name, slopes, linear))
        return Passed(total.item(), first.logprobs)

    def passes(
        self, name: str, rows: Sequence[TrainingRow], loss: TokenLoss, *, backward: bool = True
    ) -> Iterator[Passed | None]:
        """`forward_backward`, one micro-batch after the other: `None` behind each, and at last the result.

        Between two of them other adapters may be trained, pushed and sampled. Whoever closes it before its end leaves
        the gradients as they were.

        Raises:
            ConfigConflictError: a row is wrong.
        """
        held = self._of(name)
        loss.check(rows, self._vocabulary, self.max_model_length)
        total, logprobs = 0.0, list[list[float]]()
        mine: list[torch.Tensor | None] = []
        for batch in self._batches(rows):
            with self._training, torch.set_grad_enabled(backward):
                self._loras.activate(held.key)
                before = self._loras.take_gradients(held.key)
                try:
                    if mine:
                        self._loras.add_gradients(held.key, mine)
                    value, scored = self._pass(batch, loss, backward=backward)
                finally:  # those of others that come in between are not mine
                    mine = self._loras.take_gradients(held.key)
                    self._loras.add_gradients(held.key, before)
            total, logprobs = total + value, logprobs + scored
            yield None
        with self._training:
            self._loras.add_gradients(held.key, mine)
        yield Passed(total, logprobs)

    def _batches(self, rows: Sequence[TrainingRow]) -> Iterator[list[TrainingRow]]:
        batch: list[TrainingRow] = []
        for row in rows:
            is_full = batch and sum(len(each.tokens) for each in batch) + len(row.tokens) > self.tokens
            if is_full or (batch and self.why_padded):
                yield batch
                batch = []
            batch.append(row)
        yield batch

    def _pass(
        self, batch: Sequence[TrainingRow], loss: TokenLoss, *, backward: bool
    ) -> tuple[float, list[list[float]]]:
        model = self._loras.base
        device = model.get_input_embeddings().weight.device
        lengths = tuple(len(row.tokens) for row in batch)
        ids_1N = torch.tensor([[token for row in batch for token in row.tokens]], device=device)
        targets_1N = torch.tensor([[token for row in batch for token in row.targets]], device=device)
        flat = {key: [value for row in batch for value in row.inputs[key]] for key in loss.inputs}
        # Torch's default dtype is the process's, and an engine that is rebuilt in another thread changes it.
        given = {key: torch.tensor(values, dtype=torch.float32, device=device) for key, values in flat.items()}
        inputs = {"input_ids": ids_1N} if self.why_padded else row_inputs(ids_1N, lengths)
        context = contextlib.nullcontext() if self.why_padded else without_masks()
        with context, as_trained(model, self._autocast):
            found = model(**inputs, use_cache=False, shift_labels=targets_1N, fused_lm_head=True)
        logprobs_N = found.log_probs[0]
        total = loss(logprobs_N, given).sum()
        if backward:
            total.backward()
        return total.item(), [part.tolist() for part in logprobs_N.detach().split(lengths)]

    def gradients(self, name: str) -> dict[str, torch.Tensor | None]:
        """The gradients that wait for a step, by PEFT's names; `None` where there is none."""
        return self._loras.gradients(self._of(name).key)

    def zero_grad(self, name: str) -> None:
        """Drop the gradients that wait for a step, as those of a pass after which a stop has ended the loop."""
        with self._training:
            self._loras.take_gradients(self._of(name).key)

    def optim_step(
        self,
        name: str,
        learning_rate: float = 1e-4,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> dict[str, float]:
        """One step of AdamW with the gradients since the last one.

        Args:
            grad_clip_norm: 0 for no clipping.

        Returns:
            `grad_norm`, before clipping, and `step`: how many there were.

        Raises:
            ConfigConflictError: there are none, they are not finite, or a setting is out of range; weights and state
                of the optimizer are as before, as they are where an interrupt ends the step.
        """
        with self._training:
            held = self._of(name)
            settings = (learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm)
            norm = self._loras.step(held.key, *map(float, settings))
            held.steps += 1
            return {"grad_norm": norm, "step": float(held.steps)}

    def push(self, name: str) -> SyncReport:
        """Have the engine sample from the adapter as it is now: copied in place and checked, as `AdapterSync.push`.

        The version before stays, too, until the push after this one, which waits for what is still sampled from it.

        Raises:
            SyncError, CanaryError, AdapterRejectedError: the version before serves.
        """
        with self._training:
            held = self._of(name)
            self._loras.activate(held.key)
            return held.sync.push()

    def push_unless_read(self, name: str) -> SyncReport | None:
        """`push`, where it has not to wait; else `None`, and nothing is pushed."""
        with self._training:
            return self.push(name) if self._of(name).lane.may_overwrite() else None

    def is_sampled(self, name: str) -> bool:
        """Something is being sampled from the adapter, in one of its versions."""
        return self._of(name).lane.is_read()

    def version(self, name: str) -> int:
        """Of the adapter, in the engine; 0 before the first push."""
        return self._of(name).lane.version

    def sample(
        self, prompts: Mapping[str | None, Sequence[Any]], sampling: SamplingSpec | None = None, **fields: Any
    ) -> dict[str | None, Rollout]:
        """One completion for each prompt, of several adapters in the same batches.

        Args:
            prompts: token ids or text, by the name of the adapter; `None` for the bare base.
            sampling: how to sample, or give its fields by name. The seeds of an adapter's prompts do not depend on
                what else is sampled. `version` names one of an adapter's two newest versions.

        Raises:
            As `LocalEngine.generate`.
        """
        if not isinstance(prompts, Mapping):
            raise ConfigConflictError(
                "sampling: prompts are given by the name of the adapter. Use sample({name: prompts})."
            )
        lanes = {name: self._lane(name) for name in prompts}
        if len(lanes) == 1:
            return {name: lane.generate(prompts[name], sampling, **fields) for name, lane in lanes.items()}
        mine: list[int] = []
        with ThreadPoolExecutor(max(1, len(lanes)), initializer=lambda: mine.append(threading.get_ident())) as threads:
            asked = {
                name: threads.submit(lane.generate, prompts[name], sampling, **fields) for name, lane in lanes.items()
            }
            try:
                return {name: each.result() for name, each in asked.items()}
            except KeyboardInterrupt:
                while wait(asked.values(), timeout=0.1).not_done:  # one of them may just be about to begin
                    self.engine.cancel(mine)
                raise

    def sample_saved(
        self,
        directory: str | os.PathLike[str],
        prompts: Sequence[Any],
        sampling: SamplingSpec | None = None,
        **fields: Any,
    ) -> Rollout:
        """Completions of an adapter that `save` has written, held or not.

        Raises:
            AdapterRejectedError: it is none of this base.
            CanaryError: the engine does not hold what was read.
        """
        with self._guest(Path(directory)) as lane:
            return lane.generate(prompts, sampling, **fields)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        name: str | None = None,
        *,
        version: int | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> list[list[float]]:
        """The engine's logprobs of every token but the first, under an adapter, a saved one, or the bare base."""
        if directory is not None:
            with self._guest(Path(directory)) as lane:
                return lane.score(sequences)
        return self._lane(name).score(sequences, version=version)

    def _lane(self, name: str | None) -> LocalEngine:
        if name is None:
            return self.engine
        if not (lane := self._of(name).lane).version:
            raise ConfigConflictError(f"sampling: {name!r} was never pushed. Call push first.")
        return lane

    @contextlib.contextmanager
    def _guest(self, directory: Path) -> Iterator[LocalEngine]:
        """A lane that holds a saved adapter while it is read; waits where all of them hold others that are read. Who
        waits is overtaken only by those who wait, too, for the adapter whose turn it is: it is loaded once for them."""
        saved = _Saved.of(adapter_in(directory))
        ticket = _Ticket(saved)

        def free() -> list[_Guest]:
            found = [guest for guest in self._guests if guest.wanted == saved]
            return found or [guest for guest in self._guests if not guest.readers]

        with self._guests_changed:
            self._waiting.append(ticket)
            try:
                self._guests_changed.wait_for(lambda: ticket.guest or (self._waiting[0] is ticket and free()))
                if ticket.guest is None:
                    guest = min(free(), key=lambda each: each.used)
                    self._used += 1
                    guest.used, guest.wanted = self._used, saved
                    for each in [each for each in self._waiting if each.saved == saved]:
                        self._waiting.remove(each)
                        each.guest, guest.readers = guest, guest.readers + 1
            except BaseException:
                if ticket.guest is None:
                    self._waiting.remove(ticket)
                else:
                    ticket.guest.readers -= 1
                raise
            finally:
                self._guests_changed.notify_all()
        guest = ticket.guest
        try:
            with guest.lock:  # another reader may be loading it
                if guest.loaded != saved:
                    guest.loaded = None
                    self._invite(guest, directory)
                    guest.loaded = saved
            yield guest.lane
        finally:
            with self._guests_changed:
                guest.readers -= 1
                self._guests_changed.notify_all()

    def _invite(self, guest: _Guest, directory: Path) -> None:
        try:
            bundle = self._read(directory, dtype=self._engine_dtype)
            published = self._store.publish(bundle, guest.lane.version + 1)
            guest.lane.load_adapter(published, guest.lane.version + 1)
            if guest.published is not None:
                self._store.withdraw(guest.published)
            guest.published = published  # an engine that is rebuilt loads it again
            compare_held(guest.lane, bundle)
        except BaseException:
            if guest.lane.version:
                guest.lane.withdraw_adapter("what was loaded last is not what was read")
            raise

    def _read(self, directory: Path, dtype: torch.dtype | None = None) -> AdapterBundle:
        """Read an adapter while nothing else is computed: it is judged on a model without values, and to build one
        changes what is global to the process."""
        with self._training, self.engine.paused():
            return read_adapter(directory, self.base.path, dtype=dtype)

    def save(self, name: str, directory: str | os.PathLike[str], *, optimizer: bool = True) -> Path:
        """Write an adapter as a PEFT directory, with the state of its optimizer; gradients are not saved.

        Args:
            directory: is made, and holds nothing else.

        Raises:
            ConfigConflictError: there is such a directory.
        """
        path = Path(directory)
        if path.exists():
            raise ConfigConflictError(f"saving an adapter: there is a {path} already. Use another name, or remove it.")
        path.mkdir(parents=True)
        with self._training:
            held = self._of(name)
            self._loras.save(held.key, path, optimizer=optimizer)
            (path / _STATE).write_text(json.dumps({"steps": held.steps}))
        write_origin(path, self.base.identity)
        return path

    def load(self, name: str, directory: str | os.PathLike[str], *, optimizer: bool = True) -> None:
        """Give an adapter the weights of one that `save` has written, bit for bit; gradients are dropped.

        Raises:
            AdapterRejectedError: it has other layers, another rank, scaling or base, or no optimizer's state.
        """
        self._load(name, self._readable(directory), optimizer=optimizer)

    def _readable(self, directory: str | os.PathLike[str]) -> Path:
        path = adapter_in(directory)
        self._read(path)
        return path

    def _load(self, name: str, path: Path, *, optimizer: bool) -> None:
        with self._training:
            held = self._of(name)
            self._loras.load(held.key, path, optimizer=optimizer)
            held.steps = json.loads((path / _STATE).read_text())["steps"] if optimizer else 0

    def _of(self, name: str) -> _Held:
        if name not in self._held:
            known = ", ".join(map(repr, self._held)) or "none"
            raise ConfigConflictError(
                f"using an adapter: there is none named {name!r}. Held are: {known}; create and open make one."
            )
        return self._held[name]

    def close(self, *, force: bool = False) -> None:
        """Forget all adapters and stop the engine, also where an adapter cannot be dropped; harmless when repeated."""
        with contextlib.ExitStack() as left:
            left.callback(self.engine.close, force=force)
            left.callback(setattr, self, "_loras", LoraSet(None))
            left.callback(self._store.close)
            for name in self:
                left.callback(self.drop, name)

    def __enter__(self) -> Adapters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(force=error is not None)


def _last(passes: Iterator[Passed | None]) -> Passed:
    *_, found = passes
    assert found is not None
    return found
