"""`ServedPolicy`: the adapter that a server serves. Runs next to vLLM's async engine; takes an adapter whole or not at
all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_rl.adapter.store import AdapterStore, unpack_adapter
from qlora_rl.contracts import IS_PROBE, AdapterBundle, SamplingSpec, lora_name
from qlora_rl.engine import compat
from qlora_rl.engine.images import Prompt, engine_inputs, token_ids
from qlora_rl.engine.sampling import (
    SCORING,
    are_cut_off,
    check_lengths,
    holds_nan,
    parse_spec,
    sampled,
    sampling_params,
    scored_logprobs,
)
from qlora_rl.engine.server.auth import Visits
from qlora_rl.engine.server.served_weights import ServedWeights
from qlora_rl.engine.worker.parallel import described, held_digests
from qlora_rl.errors import (
    ConfigConflictError,
    ServerTakenError,
    SyncError,
    VersionGoneError,
    collected,
)

logger = logging.getLogger(__name__)

# Names are used again: vLLM keeps a label of each in its metrics. A name must not be held by two adapters at once.
_NAMES = 64
# Of an entry of A or B: a hundred times what training gives, and so small that its products stay finite in bfloat16.
_LARGEST = 100.0
# Version and digest that a request expects, `None` is any; and whether the one before that which serves will do, too.
Wanted = tuple[int | None, str | None, bool]
# Parts of PEFT's config that vLLM would leave out (patterns before 0.32), or that are no plain LoRA.
_REJECTED_CONFIG = ("rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "modules_to_save", "layer_replication")


@dataclass(frozen=True)
class Held:
    """An adapter that serves, or has.

    Attributes:
        number: of its push; grows.
        version: that the trainer gave it.
        digest: of the bytes that brought it.
        request: vLLM's LoRARequest.
        directory: where vLLM may read it again.
    """

    number: int
    version: int
    digest: str
    request: Any
    directory: Path

    @property
    def salt(self) -> str:
        """Part of the prefix-cache key of its requests."""
        return f"policy-{self.number}"


class ServedPolicy:
    """Takes, serves and drops adapters.

    Args:
        engine: vLLM's AsyncLLM.
        names: vLLM's table of model names, in which the policy is "policy"; or any dict.
        store: where adapters are for vLLM.
        sizes: [I, O] of every linear that can be adapted.
        max_rank: largest R.
        max_length: prompt plus completion, in tokens.
        visits: which requests are inside.
        weights: that are in the engine.
        base: directory that the engine has loaded.
        image_tokens: that are never sampled.
    """

    def __init__(
        self,
        engine: Any,
        names: dict[str, Any],
        store: AdapterStore,
        sizes: Mapping[str, Sequence[int]],
        max_rank: int,
        max_length: int,
        visits: Visits,
        weights: ServedWeights | None = None,
        base: Path | None = None,
        image_tokens: Sequence[int] = (),
    ):
        self.base, self.image_tokens = base, image_tokens
        self.weights = weights or ServedWeights(engine, store.root.parent, {})
        self.engine, self.names, self.store, self.visits = engine, names, store, visits
        self.sizes, self.max_rank, self.max_length = sizes, max_rank, max_length
        self.held: Held | None = None
        self.pushes = 0
        self.seconds = self.nbytes = 0.0
        self._kept: list[Held] = []
        self._is_stained = False  # there may be NaN in the KV cache
        self._lock = asyncio.Lock()
        self._rendering = asyncio.Lock()
        self.order = asyncio.Lock()  # a change that was given up must not overtake the one that repeals it

    @property
    def version(self) -> int:
        """That serves; 0 is the bare base."""
        return self.held.version if self.held else self.weights.version

    @property
    def digest(self) -> str:
        """Of the bytes that serve, or the name of the push that brought full weights; empty for the bare base."""
        return self.held.digest if self.held else self.weights.push

    async def push(self, blob: bytes, version: int, digest: str) -> bool:
        """Serve the adapter in the blob from the next request on; a repeated push changes nothing.

        Returns:
            It was not there already.

        Raises:
            SyncError: it was damaged on the way, does not fit, or cannot be kept; what served goes on serving.
        """
        found = await asyncio.to_thread(lambda: hashlib.sha256(blob).hexdigest())
        if found != digest:
            raise SyncError(
                f"taking adapter version={version}: its {len(blob)} bytes have digest={found[:16]} != "
                f"digest={digest[:16]} of what was sent. They were damaged on the way; send it again. Version "
                f"{self.version} goes on serving."
            )
        return await self._take(await asyncio.to_thread(unpack_adapter, blob), version, digest)

    async def _take(self, bundle: AdapterBundle, version: int, digest: str) -> bool:
        if version < 1:
            raise SyncError(f"taking adapter version={version}: versions begin with 1; 0 is the bare base.")
        reasons = await asyncio.to_thread(misfits, bundle, self.sizes, self.max_rank)
        if reasons:
            doing = f"taking adapter version={version}, version {self.version} goes on serving"
            raise collected(doing, reasons, SyncError)
        async with self._lock:
            if self.held is not None and (self.held.version, self.held.digest) == (version, digest):
                return False
            started = time.perf_counter()
            number = self.pushes + 1
            directory = await asyncio.to_thread(self.store.publish, bundle, version)
            self.pushes = number
            from vllm.lora.request import LoRARequest

            request = LoRARequest(f"policy-{number % _NAMES}", number, str(directory))
            try:
                await self.engine.add_lora(request)
            except BaseException as error:
                with contextlib.suppress(Exception):
                    await self.engine.remove_lora(number)
                self.store.withdraw(directory)
                if not isinstance(error, Exception) or compat.is_dead_engine(error):
                    raise
                raise SyncError(
                    f"taking adapter version={version}: vLLM rejects it: {error}. Version {self.version} goes on "
                    "serving."
                ) from error
            self.held = Held(number, version, digest, request, directory)
            if bundle.config.get(IS_PROBE):
                self.names.pop("policy", None)  # nobody chats with it
            else:
                self.names["policy"] = request
            self.visits.current = number
            self._kept.append(self.held)
            self._retire()
            self.seconds, self.nbytes = time.perf_counter() - started, float(bundle.nbytes)
            return True

    async def drop(self) -> None:
        """Serve the bare base as version 0."""
        async with self._lock:
            held, self.held = self.held, None
            self.names.pop("policy", None)
            if held is not None:
                self.pushes += 1
                self.visits.current = self.pushes
        await self.weights.drop()

    def _retire(self) -> None:
        """Remove what no request inside may name, but for the version before the newest."""
        oldest = self.visits.oldest()
        while len(self._kept) > 2 and self._kept[1].number <= oldest:
            self.store.withdraw(self._kept.pop(0).directory)

    async def holds(self, rank: int) -> dict[str, str]:
        """Digests of what vLLM multiplies with; see `BaseExtension.qlora_held_adapter`."""
        async with self._lock:
            if self.held is None:
                return {}
            # Loads it again if requests for older ones have pushed it out of its slot.
            await self.engine.add_lora(self.held.request)
            return held_digests(await self.engine.collective_rpc("qlora_held_adapter", args=(self.held.number, rank)))

    async def describe_base(self) -> dict[str, Any]:
        """The base as vLLM holds it (`BaseFingerprint.as_dict`)."""
        answers = await self.engine.collective_rpc("qlora_describe_base")
        return answers[0] if len(answers) == 1 else (await asyncio.to_thread(described, answers, self.base)).as_dict()

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Mapping[str, Any],
        places: list[int] | None = None,
        wanted: Wanted = (None, None, False),
    ) -> dict[str, Any]:
        """One completion for each of B prompts, all by the version that serves now; `places` decide the seeds.

        Raises:
            ServerTakenError: it is not `wanted` (version and digest; `None` is any).
        """
        spec = parse_spec(sampling)
        version, outputs = await self._run(prompts, spec, places, wanted=wanted)
        return {**sampled(outputs), "version": version}

    async def score(
        self, sequences: Sequence[Prompt], bare: bool, wanted: Wanted = (None, None, False)
    ) -> dict[str, Any]:
        """Logprobs of every token but the first; `wanted` as in `generate`."""
        version, outputs = await self._run(sequences, SCORING, bare=bare, wanted=wanted)
        ids = map(token_ids, sequences)
        scored = [scored_logprobs(each, o.prompt_logprobs) for each, o in zip(ids, outputs, strict=True)]
        return {"logprobs": scored, "version": version}

    async def _run(
        self,
        asked: Sequence[Prompt],
        spec: SamplingSpec,
        places: list[int] | None = None,
        *,
        bare: bool = False,
        wanted: Wanted = (None, None, False),
    ) -> tuple[int, list[Any]]:
        check_lengths([token_ids(each) for each in asked], self.max_length)
        await self._clear_stains()  # whoever had sampled NaN may have gone before it was cleared away
        async with self.weights.reading(bare=bare):
            # Not before: it may have waited for a push. Nothing is awaited until `held` is read.
            held = self._find(*wanted)
            # It may be one from before this request came: its directory stays until vLLM needs it no more.
            with contextlib.nullcontext() if held is None else self.visits.visit(held.number):
                version, outputs = await self._sample(asked, spec, None if bare else held, places)
            if await asyncio.to_thread(holds_nan, outputs):  # no `|=`: it would forget what others find meanwhile
                self._is_stained = True
        await self._clear_stains()
        return version, outputs

    async def _clear_stains(self) -> None:
        if not self._is_stained:
            return
        logger.warning("version %d gives NaN: the KV cache is cleared, so that no later request reads it", self.version)
        self._is_stained = False  # what others find from here on counts
        try:
            await self.weights.clear_cache()
        except BaseException:
            self._is_stained = True
            raise

    def _find(self, version: int | None, digest: str | None, or_before: bool) -> Held | None:
        """What is asked for: that which serves, or an adapter before it, whose directory is still there."""
        if version in (None, self.version) and digest in (None, self.digest):
            return self.held
        if or_before:
            for held in self._kept if self.held is not None else ():
                if (held.version, held.digest) == (version, digest):
                    return held
            raise VersionGoneError(f"generating: version={version} is no longer held; version {self.version} serves.")
        is_other = digest is not None and digest != self.digest
        raise ServerTakenError(
            f"generating: version={version} is asked for, and {'another ' * is_other}version={self.version} serves: "
            "somebody else has pushed. One server serves one trainer; start another server."
        )

    async def _sample(
        self, asked: Sequence[Prompt], spec: SamplingSpec, held: Held | None, places: Sequence[int] | None
    ) -> tuple[int, list[Any]]:
        places = range(len(asked)) if places is None else places
        params = sampling_params(spec, places, never=self.image_tokens)
        lora, salt = (None, self.weights.salt) if held is None else (held.request, held.salt)
        call = uuid.uuid4().hex
        if self.image_tokens:
            async with self._rendering:  # images are processed aside, while others sample
                inputs = await asyncio.to_thread(engine_inputs, self.engine.renderer, asked, salt, self.weights.salt)
        else:
            inputs = engine_inputs(None, asked, salt, "")

        async def one(index: int) -> Any:
            last = None
            async for output in self.engine.generate(
                inputs[index], params[index], f"{call}-{index}", lora_request=lora
            ):
                last = output
            return last

        tasks = [asyncio.ensure_future(one(i)) for i in range(len(asked))]
        try:
            outputs = await asyncio.gather(*tasks)
        except Exception as error:
            found = error.__cause__ if isinstance(error.__cause__, compat.refusals()) else error  # vLLM wraps some
            if not isinstance(found, compat.refusals()):
                raise
            raise ConfigConflictError(f"generating: vLLM rejects a prompt: {found}") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if are_cut_off(outputs, params):  # which vLLM answers like any other
            count = sum(are_cut_off([output]) for output in outputs)
            raise compat.EngineEndingError(f"vLLM has given up {count} of {len(outputs)} requests before their end")
        return (held.version if held else self.weights.version), list(outputs)


def misfits(bundle: AdapterBundle, sizes: Mapping[str, Sequence[int]], max_rank: int) -> list[str]:
    """Why this adapter cannot be served on this base; empty when it can.

    Args:
        bundle: the adapter.
        sizes: [I, O] of every linear that can be adapted.
        max_rank: largest R.
    """
    config, tensors = bundle.config, bundle.tensors
    if not isinstance(config, Mapping):
        return ["its config is no JSON object"]
    reasons = [
        f"its config has {name}={config[name]!r}, which export_adapter never writes"
        for name in _REJECTED_CONFIG
        if config.get(name)
    ]
    if config.get("bias", "none") != "none":
        reasons.append(f"its config has bias={config['bias']!r}, which vLLM does not serve")
    rank = config.get("r")
    if type(rank) is not int or not 0 < rank <= max_rank:
        return [*reasons, f"rank={rank} is not between 1 and max_lora_rank={max_rank} of the server"]
    if type(config.get("lora_alpha")) not in (int, float) or config["lora_alpha"] != rank:
        reasons.append(
            f"lora_alpha={config.get('lora_alpha')!r} is not r={rank}: export_adapter writes the scaling into B"
        )
    if config.get("use_rslora"):
        reasons.append("its config has use_rslora, which scales by another factor than 1")
    expected: dict[str, tuple[int, int]] = {}
    for name in bundle.modules:
        if name not in sizes:
            reasons.append(f"{name} is no linear that this server can adapt: another base?")
            continue
        columns, rows = sizes[name]
        expected[lora_name(name, "A")] = (rank, columns)
        expected[lora_name(name, "B")] = (rows, rank)
    if not tensors:
        reasons.append("it is empty")
    known = {lora_name(name, part) for name in bundle.modules for part in "AB"}
    reasons += [f"{name} is no A or B of a plain LoRA" for name in tensors if name not in known]
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            reasons.append(f"{name} is missing")
        elif tuple(tensor.shape) != shape:
            reasons.append(f"{name} has shape={tuple(tensor.shape)}, the server needs {shape}: another base or rank?")
        elif tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reasons.append(f"{name} has dtype={tensor.dtype}")
        elif not bool(torch.isfinite(tensor).all()):
            reasons.append(f"{name} holds NaN or infinity")
        elif float(tensor.abs().max()) > _LARGEST:
            reasons.append(
                f"{name} holds {float(tensor.abs().max()):.3g}, larger than {_LARGEST:.0f}: the policy would give NaN"
            )
    return reasons
