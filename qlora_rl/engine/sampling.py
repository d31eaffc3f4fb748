"""Our SamplingSpec in vLLM's words, and vLLM's logprobs in ours."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from qlora_rl.contracts import SamplingSpec


def sampling_params(spec: SamplingSpec, index: int) -> Any:
    """vLLM's parameters for request `index` of a call."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    fields: dict[str, Any] = {
        "n": 1,
        "max_tokens": spec.max_tokens,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "min_p": spec.min_p,
        "repetition_penalty": spec.repetition_penalty,
        "logprobs": 0,  # the drawn token's, no others
        "seed": None if spec.seed is None else request_seed(spec.seed, index),
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "detokenize": False,
    }
    fields |= dict(spec.extra)
    structured = fields.get("structured_outputs")
    if isinstance(structured, dict):
        fields["structured_outputs"] = StructuredOutputsParams(**structured)
    if spec.regex is not None:
        fields["structured_outputs"] = StructuredOutputsParams(regex=spec.regex)
    if fields.get("stop"):
        fields["detokenize"] = True  # stop strings are looked for in the text
    return SamplingParams(**fields)


def request_seed(seed: int, index: int) -> int:
    """Seed of request `index` of a call whose seed is `seed`: 63 bits, unrelated for neighbouring indices."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "big") >> 1


def sampled_logprobs(output: Any) -> list[float | None]:
    """The drawn tokens' logprobs out of vLLM's completion output; `None` for NaN."""
    values = []
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        logprob = entry[token].logprob
        values.append(None if math.isnan(logprob) else logprob)
    return values
