"""How far 4-bit bases of a real model are from it: plain, with scales searched, calibrated on two texts, with LoftQ's
adapter; and int4 by the same error feedback.

    python benchmarks/calibration.py MODEL GSM8K.jsonl [--rows NAME ...]

writes results/calibration.json, row by row: rows that are in it are kept, unless they are named. MODEL is the
checkpoint of a chat model; GSM8K.jsonl has rows with "question" and "answer", of which the first are calibrated on and
the last are held out. Prose is licences that Debian ships, code the standard library of Python. Seconds are of the
processor.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rounds import measured_at
from transformers import AutoModelForCausalLM, AutoTokenizer

from qlora_rl.base.calibration import codes
from qlora_rl.base.calibration.blocks import chooser, quantise_by_blocks
from qlora_rl.base.calibration.codes import choose_codes
from qlora_rl.base.calibration.text import shipped_text, token_sequences
from qlora_rl.base.quant import QuantSpec, quantize_linear
from qlora_rl.base.reader import read_4bit
from qlora_rl.train.run import describe_versions

RESULTS = Path(__file__).parent / "results" / "calibration.json"
WAYS = ("plain", "scale search alone", "calibrated on GSM8K", "calibrated on the shipped text")
RANK = 16
LOFTQ = f", with LoftQ's adapter of rank {RANK}"
INT4 = "int4 (4.25 bits), error feedback on the shipped text"
DOUBLE, SINGLE = (f", {each} quantisation" for each in ("double", "single"))
# Names of rows: what is quantised how, and what is added.
ROWS = (
    *(way + scales for scales in (DOUBLE, SINGLE) for way in WAYS),
    *(way + DOUBLE + LOFTQ for way in (WAYS[0], WAYS[3])),
    INT4,
)
CALIBRATION_ROWS, HELD_OUT, LENGTH = 24, 3, 200
LICENCES = ("GPL-3", "Apache-2.0", "MPL-1.1")
MODULES = ("argparse", "csv", "shlex")


def conversation(row: Mapping[str, str]) -> list[dict[str, str]]:
    """A row of GSM8K as messages."""
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]


def held_out_texts(rows: list[dict[str, str]], tokenizer: Any, model: Any) -> dict[str, list[list[int]]]:
    """Token ids of some texts of three kinds."""
    prose = [Path("/usr/share/common-licenses", name).read_text()[2000:4000] for name in LICENCES]
    code = [Path(os.__file__).with_name(f"{name}.py").read_text()[3000:5000] for name in MODULES]
    texts = {"GSM8K": [conversation(row) for row in rows[-HELD_OUT:]], "prose": prose, "code": code}
    return {kind: [ids[:LENGTH] for ids in token_sequences(each, tokenizer, model)] for kind, each in texts.items()}


@torch.no_grad()
def logprobs(model: Any, texts: Mapping[str, list[list[int]]]) -> dict[str, list[torch.Tensor]]:
    """Of every token, by the kind of text."""
    return {
        kind: [torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)[:-1] for ids in each]
        for kind, each in texts.items()
    }


def compared(source: Any, base: Any, texts: Mapping[str, list[list[int]]]) -> dict[str, Any]:
    """KL of the source to the base in nats a token, and the perplexity of the base, by the kind of text."""
    found = {}
    for kind, each in texts.items():
        kl = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(source[kind], base[kind], strict=True)])
        loss = [-b.gather(1, torch.tensor(ids)[1:, None])[:, 0] for b, ids in zip(base[kind], each, strict=True)]
        found[kind] = {"kl": float(kl.mean()), "perplexity": float(torch.cat(loss).mean().exp())}
    return found


class Int4(codes._Feedback):
    """The same error feedback with symmetric int4 instead: codes -8 to 7, a bf16 scale for each block."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._values = torch.arange(-8, 8) / 7.5
        self._middles = (self._values[1:] + self._values[:-1]) / 2

    def _storable(self, absmax_O: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale_O = absmax_O.bfloat16().float()
        return scale_O, scale_O


def int4(model: Any, weights: Mapping[str, torch.Tensor], text: list[list[int]]) -> dict[str, torch.Tensor]:
    """The weights of an int4 base, float32."""
    found: dict[str, torch.Tensor] = {}
    spec = QuantSpec(double_quant=False)
    choose = chooser(spec, weights, {})

    def quantise(names: Any, moments_II: Any) -> Mapping[str, torch.Tensor]:
        found.update(made := choose(names, moments_II))
        return made

    with mock.patch.object(codes, "_Feedback", Int4):
        quantise_by_blocks(model, spec, weights, quantise, text)
    return found


def low_rank(residual_OI: torch.Tensor) -> torch.Tensor:
    """What LoftQ's adapter holds of it at its start, as PEFT makes it (one round)."""
    u, s, vh = torch.linalg.svd(residual_OI, full_matrices=False)
    return u[:, :RANK] * s[:RANK] @ vh[:RANK]


def decoded(
    way: str, spec: QuantSpec, model: Any, weights: Mapping[str, torch.Tensor], texts: Mapping[str, list[list[int]]]
) -> dict[str, torch.Tensor]:
    """The weights of a base, float32."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    if way == "plain":
        found = {name: quantize_linear(weight, spec) for name, weight in weights.items()}
    elif way == "scale search alone":
        found = {name: choose_codes([weight], spec, None)[0].tensors for name, weight in weights.items()}
    else:
        quantise_by_blocks(model, spec, weights, chooser(spec, weights, found), texts[way])
    stored = {name: read_4bit(each, "weight") for name, each in found.items()}
    return {name: each.dequantised() for name, each in stored.items() if each is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("--rows", nargs="*", default=[], help="rows that are measured again")
    arguments = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"rows": {}}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
    rows = [json.loads(line) for line in arguments.gsm8k.read_text().splitlines()]
    calibration = {
        WAYS[2]: token_sequences([conversation(row) for row in rows[:CALIBRATION_ROWS]], tokenizer, model),
        WAYS[3]: token_sequences(shipped_text(), tokenizer, model),
    }
    texts = held_out_texts(rows, tokenizer, model)
    exact = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    source = logprobs(exact, texts)
    parameters = dict(exact.named_parameters())
    weights = {name: each.data for name, each in model.named_parameters() if name.endswith("_proj.weight")}
    tokens = {kind: sum(len(ids) - 1 for ids in each) for kind, each in texts.items()}
    if found.get("tokens", tokens) != tokens:
        parser.error(f"{RESULTS} has rows of other texts ({found['tokens']} tokens, here {tokens})")
    found |= {
        "model": arguments.model.name,
        "tokens": tokens,
        "calibration_tokens": {way: sum(map(len, each)) for way, each in calibration.items()},
        "source": compared(source, source, texts),
        "threads": torch.get_num_threads(),
        "versions": describe_versions(),
        "commit": measured_at(),
    }
    for name in ROWS:
        if name in found["rows"] and name not in arguments.rows:
            continue
        began, (way, _, _) = time.process_time(), name.partition(", ")
        if name == INT4:
            made = int4(model, weights, calibration[WAYS[3]])
        else:
            made = decoded(way, QuantSpec(double_quant=DOUBLE in name), model, weights, calibration)
        if name.endswith(LOFTQ):
            made = {each: weight + low_rank(weights[each].float() - weight) for each, weight in made.items()}
        for each, weight in made.items():
            parameters[each].data = weight
        seconds = time.process_time() - began
        found["rows"][name] = {"seconds": seconds, "texts": compared(source, logprobs(exact, texts), texts)}
        RESULTS.write_text(json.dumps(found, indent=1))
        shown = {kind: round(each["kl"], 4) for kind, each in found["rows"][name]["texts"].items()}
        print(name, f"{seconds:.0f} s", shown, flush=True)


if __name__ == "__main__":
    main()
