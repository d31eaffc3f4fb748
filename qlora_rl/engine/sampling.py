"""Our SamplingSpec in vLLM's words, and vLLM's logprobs in ours."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from qlora_rl.contracts import SamplingSpec
from qlora_rl.errors import ConfigConflictError, PromptTooLongError

# Of vLLM's SamplingParams, but the engine's own.
_OURS = {"logprobs", "n", "output_kind"}
# Asks for nothing but the logprobs of the prompt.
SCORING = SamplingSpec(max_tokens=1, temperature=0.0, extra={"prompt_logprobs": 0})


def several(prompts: Any) -> list[Any]:
    """The prompts of a call, also out of an iterator.

    Raises:
        ConfigConflictError: they are one prompt instead of several, or messages.
    """
    if isinstance(prompts, Mapping):
        raise ConfigConflictError("generating: prompts is a dictionary, as tokenizers return. Pass its input_ids.")
    rows = [0] if isinstance(prompts, str) or not isinstance(prompts, Iterable) else list(prompts)
    if any(isinstance(row, Integral) or getattr(row, "ndim", None) == 0 for row in rows):
        raise ConfigConflictError("generating: prompts is a single prompt. Pass a list that holds it.")
    if any(
        isinstance(row, Mapping) or (isinstance(row, list | tuple) and row and isinstance(row[0], Mapping))
        for row in rows
    ):
        raise ConfigConflictError(
            "generating: a prompt is messages. Make token ids of them: tokenizer.apply_chat_template(messages, "
            "add_generation_prompt=True, return_dict=False)."
        )
    return rows


def as_ids(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Token ids as plain integers.

    Raises:
        ConfigConflictError: a prompt is text.
    """
    if any(isinstance(row, str) for row in rows):
        raise ConfigConflictError(
            "generating: a prompt is a string, and token ids are asked for. Encode it with the base's tokenizer."
        )
    return [[int(token) for token in row] for row in rows]


def spec_of(sampling: SamplingSpec | None, fields: Mapping[str, Any]) -> SamplingSpec:
    """What a call of `generate` was given: either of both."""
    if sampling is not None and fields:
        raise TypeError("generate: give either sampling= or its fields by name, not both.")
    return sampling or SamplingSpec(**fields)


def parse_spec(fields: Mapping[str, Any]) -> SamplingSpec:
    """How to sample, as somebody has sent it; `sampling_params` looks at the types.

    Raises:
        ConfigConflictError: a field is none of `SamplingSpec`.
    """
    try:
        return SamplingSpec(**fields)
    except TypeError as error:
        raise ConfigConflictError(f"generating: {error}. Send the fields of SamplingSpec.") from error


def sampling_params(spec: SamplingSpec, places: Sequence[int], *, never: Sequence[int] = ()) -> list[Any]:
    """vLLM's parameters for the requests at `places` of a call.

    Tokens of `never` are not sampled; their share of the probability goes to all others. What JSON and TOML cannot say
    is as vLLM's engine reads it from a message: names of tokens ("5") are numbers, and fields of a field an object.

    Raises:
        ConfigConflictError: vLLM rejects them, a value has another type than vLLM's field, or a field of `extra` is
            ours.
    """
    try:
        if never:
            bias = {**dict.fromkeys(never, -100.0), **(spec.extra.get("logit_bias") or {})}
            spec = replace(spec, extra={**spec.extra, "logit_bias": bias})
        import msgspec  # vLLM's own way between its processes
        from vllm import SamplingParams

        # Numbers of numpy and torch are plain ones.
        sent = msgspec.msgpack.encode([_params(spec, index) for index in places], enc_hook=lambda each: each.tolist())
        return msgspec.msgpack.decode(sent, type=list[SamplingParams], strict=False)
    except ConfigConflictError:
        raise
    except Exception as error:  # vLLM has an error type of its own for them
        raise ConfigConflictError(f"generating: vLLM rejects the sampling arguments: {error}") from error


def _params(spec: SamplingSpec, index: int) -> Any:
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
        "logprobs": 0,  # the sampled token's, no others
        "seed": None if spec.seed is None else request_seed(spec.seed, spec.first_place + index),
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "detokenize": False,
        "skip_clone": True,  # vLLM would copy for each request what `sampling_params` makes for one
    }
    if ours := sorted(_OURS & set(spec.extra)):
        raise ConfigConflictError(
            f"generating: extra holds {', '.join(ours)}, which the engine sets itself. Leave it out."
        )
    fields |= dict(spec.extra)
    structured = fields.get("structured_outputs")
    if isinstance(structured, dict):
        fields["structured_outputs"] = StructuredOutputsParams(**structured)
    if spec.regex is not None:
        fields["structured_outputs"] = StructuredOutputsParams(regex=spec.regex)
    if spec.stop_token_ids and not fields.get("ignore_eos"):
        fields["stop_token_ids"] = sorted({*spec.stop_token_ids, *(fields.get("stop_token_ids") or ())})
    if fields.get("stop"):
        fields["detokenize"] = True  # stop strings are looked for in the text
    return SamplingParams(**fields)


def request_seed(seed: int, index: int) -> int:
    """Seed of request `index` of a call whose seed is `seed`: 63 bits, unrelated for neighbouring indices."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "big") >> 1


def are_cut_off(outputs: Iterable[Any], params: Sequence[Any] = ()) -> bool:
    """One of vLLM's request outputs (`None`: it gave none) was not generated to its end, and what there is of it is no
    sample of the policy: vLLM ends, or has dropped it.

    Args:
        params: of the requests.

    Raises:
        ConfigConflictError: where a pattern is asked for, no token of the model went on in it.
    """
    reasons = ["abort" if output is None else output.outputs[0].finish_reason for output in outputs]
    if "error" in reasons and any(getattr(each, "structured_outputs", None) is not None for each in params):
        raise ConfigConflictError(
            "generating: vLLM has ended a completion with an error, as it does where no token of the model goes on in "
            "the pattern that is asked for (regex). Use a pattern that the model's tokens can follow."
        )
    return bool({"abort", "error"} & {*reasons})


def sampled(outputs: Sequence[Any]) -> dict[str, list[Any]]:
    """The fields of a `Rollout` that vLLM's request outputs hold."""
    firsts = [output.outputs[0] for output in outputs]
    return {
        "completion_ids": [list(each.token_ids) for each in firsts],
        "logprobs": [sampled_logprobs(each) for each in firsts],
        "has_ended": [each.finish_reason == "stop" for each in firsts],
    }


def holds_nan(outputs: Iterable[Any]) -> bool:
    """A logprob in vLLM's request outputs is NaN."""
    for output in outputs:
        entries = [entry for entry in output.prompt_logprobs or () if entry]
        entries += [entry for each in output.outputs for entry in each.logprobs or ()]
        if any(math.isnan(each.logprob) for entry in entries for each in entry.values()):
            return True
    return False


def sampled_logprobs(output: Any) -> list[float | None]:
    """The sampled tokens' logprobs out of vLLM's completion output; `None` for NaN."""
    values = []
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        logprob = entry[token].logprob
        values.append(None if math.isnan(logprob) else logprob)
    return values


def check_lengths(ids: Sequence[Sequence[int]], max_model_length: int) -> None:
    """Reject prompts (token ids) that are empty or leave no room for a completion.

    Raises:
        PromptTooLongError: names every one of them.
    """
    reasons = [
        f"prompt {i} has {len(p)} tokens" if len(p) else f"prompt {i} is empty"
        for i, p in enumerate(ids)
        if not 0 < len(p) < max_model_length
    ]
    if reasons:
        shown = ", ".join(reasons[:5]) + (f" and {len(reasons) - 5} more" if len(reasons) > 5 else "")
        raise PromptTooLongError(
            f"generating: {shown}; max_model_length={max_model_length} must hold the prompt and at least one token. "
            "Shorten the prompts, or raise max_model_length (vllm_max_model_length of GRPOConfig, max_length of "
            "OnlineDPOConfig).",
            reasons=reasons,
        )


def scored_logprobs(ids: Sequence[int], prompt_logprobs: Sequence[Any]) -> list[float]:
    """Logprobs of every token but the first, out of vLLM's prompt logprobs."""
    return [entry[token].logprob for token, entry in zip(ids[1:], prompt_logprobs[1:], strict=True)]
