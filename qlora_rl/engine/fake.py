"""`FakeEngine`: a small real engine in plain torch. It generates, serves adapters and reports logprobs; no vLLM needed.

For unit tests and for reading: what an engine must do fits on one screen. It recomputes the whole prefix for every
token, so keep it to tiny models.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.experts import has_linear_experts
from qlora_rl.base.fingerprint import digest_bytes, fingerprint_base
from qlora_rl.contracts import (
    AdapterSlots,
    BaseFingerprint,
    ClosedAtEnd,
    EngineCapabilities,
    Rollout,
    SamplingSpec,
    module_of,
)
from qlora_rl.engine.sampling import as_ids, several
from qlora_rl.errors import EngineBrokenError, EngineClosedError, NotYetSupportedError, PromptTooLongError, SyncError


class FakeEngine(ClosedAtEnd):
    """Serves a transformers model.

    Args:
        model: a causal LM of its own (it must not be the one that is trained); 4-bit or not.
        max_lora_rank: largest rank that it takes.
        max_model_length: prompt plus completion, in tokens.
        eos_token_id: ends a completion, or several that do; by default the model's.

    Attributes:
        version: of the adapter that serves now; 0 is the bare base.
        incarnation: grows with every wake.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_lora_rank: int = 64,
        max_model_length: int = 64,
        eos_token_id: int | Sequence[int] | None = None,
    ):
        self.model = model.train()  # train mode keeps bitsandbytes from repacking; tiny models have no dropout
        self.max_lora_rank = max_lora_rank
        self.max_model_length = max_model_length
        self.eos_token_id = model.config.get_text_config().eos_token_id if eos_token_id is None else eos_token_id
        self.version, self.incarnation = 0, 1
        self._hooks: list[Any] = []
        self._bare = False
        self._held: Mapping[str, torch.Tensor] = {}
        self._slots: AdapterSlots | None = None
        self._lost = ""
        self._is_closed = False
        self.naps = 0
        self._is_asleep = False

    def capabilities(self) -> EngineCapabilities:
        """What this engine can be asked for; it says that it can sleep so that the state machine can be tested."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        return EngineCapabilities(
            "fake (torch)",
            True,
            False,
            self.max_lora_rank,
            self.max_model_length,
            dtype,
            True,
            takes_in_place=True,
            adapts_experts=has_linear_experts(self.model),
        )

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[float]]:
        """Natural logs of the probabilities of every token but the first; with `bare` under the base alone."""
        if bare and self._hooks:
            held, self._bare = self._bare, True
            try:
                return self.score(sequences)
            finally:
                self._bare = held
        device = next(self.model.parameters()).device
        scores = []
        for ids in sequences:
            logits_TV = self.model(torch.tensor([list(ids)], device=device)).logits[0, :-1].float()
            targets = torch.tensor(list(ids)[1:], device=device)[:, None]
            scores.append(logits_TV.log_softmax(-1).gather(1, targets)[:, 0].tolist())
        return scores

    def held_adapter(self, rank: int) -> dict[str, str]:
        """Digests of the pairs that the hooks multiply with."""
        return {name: digest_bytes(t) for name, t in self._held.items() if bool(t.any())}

    def describe_base(self) -> BaseFingerprint:
        """The base as it is held here."""
        return fingerprint_base(self.model)

    def repair_base(self) -> dict[str, float]:
        """Nothing is rounded here."""
        return {}

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSpec | None = None,
        *,
        places: Sequence[int] | None = None,
        **fields: Any,
    ) -> Rollout:
        """One completion for each of B prompts (token ids); temperature, greedy, seeds, stop tokens, `min_tokens` and
        the length limit are honoured.

        `places`: number of each prompt in the whole of which these are a part; decides its seed.
        """
        if self._is_closed:
            raise EngineClosedError("using the engine: it was closed. Make a new FakeEngine.")
        if self._lost:
            raise EngineBrokenError(f"generating: {self._lost}. Push the adapter again, or call drop_adapter().")
        spec = sampling or SamplingSpec(**fields)
        known = ("max_tokens", "temperature", "seed", "first_place", "stop_token_ids")
        plain = SamplingSpec(**{name: getattr(spec, name) for name in known})
        if replace(spec, extra={}) != plain or spec.extra.keys() - {"stop_token_ids", "ignore_eos", "min_tokens"}:
            raise NotYetSupportedError(
                f"generating: {spec}: the fake engine knows max_tokens, min_tokens, temperature, seed and stop tokens "
                "only. Use LocalEngine."
            )
        prompts = as_ids(several(prompts))
        too_long = [i for i, p in enumerate(prompts) if not 0 < len(p) < self.max_model_length]
        if too_long:
            raise PromptTooLongError(
                f"generating: prompts {too_long} do not fit max_model_length={self.max_model_length}. Shorten them."
            )
        started = time.perf_counter()
        numbers = range(len(prompts)) if places is None else places
        sampled = [self._complete(list(p), spec, spec.first_place + i) for i, p in zip(numbers, prompts, strict=True)]
        return Rollout(
            [ids for ids, _, _ in sampled],
            [logprobs for _, logprobs, _ in sampled],
            self.version,
            time.perf_counter() - started,
            has_ended=[has_ended for _, _, has_ended in sampled],
        )

    def _complete(
        self, prompt: list[int], spec: SamplingSpec, index: int
    ) -> tuple[list[int], list[float | None], bool]:
        own = self.eos_token_id if isinstance(self.eos_token_id, Sequence) else [self.eos_token_id]
        ends = {*own, *spec.stop_token_ids, *(spec.extra.get("stop_token_ids") or ())}
        # As in vLLM none of them is sampled before `min_tokens`, and logprobs are of all others there.
        barred, least = sorted(ends - {None}), spec.extra.get("min_tokens") or 0
        ends = set() if spec.extra.get("ignore_eos") else ends
        generator = None if spec.seed is None else torch.Generator().manual_seed(spec.seed + index)
        ids: list[int] = []
        logprobs: list[float | None] = []
        device = next(self.model.parameters()).device
        while len(ids) < spec.max_tokens and len(prompt) + len(ids) < self.max_model_length:
            logits_V = self.model(torch.tensor([prompt + ids], device=device)).logits[0, -1].float().cpu()
            logits_V[barred if len(ids) < least else []] = -math.inf
            logprobs_V = (logits_V / (spec.temperature or 1.0)).log_softmax(-1)
            if spec.temperature == 0:
                token = int(logprobs_V.argmax())
            else:
                token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(logprobs_V[token]))
            if token in ends:
                return ids, logprobs, True
        return ids, logprobs, False

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a canonical PEFT directory as `version`; all of its modules must exist here."""

        self._serve(self._read(directory, version), version)
        self._slots = None

    def lend_slots(self, directory: Path) -> AdapterSlots:
        """Two copies of what is in the directory."""
        tensors = self._read(directory, self.version)
        first, second = ({name: tensor.clone() for name, tensor in tensors.items()} for _ in range(2))
        self._slots = slots = AdapterSlots((first, second), lambda: self._slots is slots)
        return slots

    def serve_slot(self, slots: AdapterSlots, index: int, version: int, recover: Callable[[], Path]) -> None:
        """Multiply with one of them."""
        self._serve(slots.places[index], version)

    def _read(self, directory: Path, version: int) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        rank = int(json.loads((Path(directory) / "adapter_config.json").read_text())["r"])
        if rank > self.max_lora_rank:
            raise SyncError(f"loading adapter version={version}: rank={rank} > max_lora_rank={self.max_lora_rank}.")
        tensors = load_file(Path(directory) / "adapter_model.safetensors")
        modules = dict(self.model.named_modules())
        for name in tensors:
            module = module_of(name)
            if module not in modules:
                raise SyncError(f"loading adapter version={version}: no module {module} here.", module=module)
        return tensors

    def _serve(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        for hook in self._hooks:
            hook.remove()
        self._held, self._lost = tensors, ""
        modules = dict(self.model.named_modules())
        self._hooks = [
            modules[module_of(name)].register_forward_hook(self._added(a_RI, tensors[name.replace("lora_A", "lora_B")]))
            for name, a_RI in tensors.items()
            if name.endswith(".lora_A.weight")
        ]
        self.version = version

    def _added(self, a_RI: torch.Tensor, b_OR: torch.Tensor) -> Any:
        """A forward hook that adds B @ A @ x to a linear's output."""

        def hook(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if self._bare:
                return output
            return output + (inputs[0].to(a_RI.dtype) @ a_RI.T @ b_OR.T).to(output.dtype)

        return hook

    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._held, self.version, self._slots, self._lost = [], {}, 0, None, ""

    def withdraw_adapter(self, reason: str) -> None:
        """Serve nothing until the next push."""
        self._lost = reason

    def sleep(self) -> None:
        """Count a nap; there is nothing to give back."""
        if not self._is_asleep:
            self.naps += 1
            self._is_asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._is_asleep:
            self.incarnation += 1
            self._is_asleep = False

    def close(self) -> None:
        """Take the adapter off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._is_closed = [], True
