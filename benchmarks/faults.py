"""Faults that are planted between trainer and engine under a young adapter of a real model: which check finds them?

    python benchmarks/faults.py [--steps 3] [--seed 0]

writes results/faults.json; rows that are in it are kept. SmolLM2-135M-Instruct is downloaded, and trained for a few
steps with the settings of benchmarks/noise.py; then each fault is planted alone, and taken back. Of each the numbers of
all checks are kept, whichever has found it first: whether the bytes that the engine holds are what was pushed, the
canary's difference under the policy and under the probe, and the distance of a batch, with the cause that an
examination of it names. The last three are of a fault in the multiplication where vLLM multiplies in its own way, as on
a GPU: the bytes are right then, and the first check sees nothing. Some are then planted in the products themselves,
with right bytes, as a wrong kernel would do it; with another number of steps than 3 these alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from noise import LORA
from rounds import described

from qlora_rl import QLoRAGRPOTrainer, prepare_base, verify_base
from qlora_rl.config.launch import trainer_arguments, trl_config
from qlora_rl.config.read import read_config
from qlora_rl.contracts import SamplingSpec
from qlora_rl.data.load import load_data
from qlora_rl.demo.real_model import real_model
from qlora_rl.demo.real_run import write_project
from qlora_rl.engine.linears.linear import AdapterProducts
from qlora_rl.errors import BaseMismatchError, CanaryError
from qlora_rl.rewards import load_reward
from qlora_rl.sync import mismatch_debugger
from qlora_rl.sync.mismatch_debugger import MismatchDebugger, Sampled
from qlora_rl.train.setup.settings import autocast_dtype

RESULTS = Path(__file__).parent / "results" / "faults.json"
STEPS = 3
Places = Mapping[str, torch.Tensor]
Plant = Callable[[Places, Places], None]


def named(places: Places, *parts: str) -> list[torch.Tensor]:
    return [place for name, place in places.items() if all(part in name for part in parts)]


def scaled(factor: float) -> Plant:
    return lambda now, before: [place.mul_(factor) for place in named(now, ".lora_B.")] and None


def lost(*parts: str) -> Plant:
    return lambda now, before: [place.zero_() for place in named(now, *parts)] and None


def stale(now: Places, before: Places) -> None:
    for name, place in now.items():
        place.copy_(before[name])


def misplaced(now: Places, before: Places) -> None:
    """One layer's q_proj gets the matrices of the next one's."""
    for part in "AB":
        (there,), (own,) = (named(now, f"layers.{i}.self_attn.q_proj.lora_{part}.") for i in (15, 14))
        own.copy_(there)


def flipped(part: str) -> Plant:
    def plant(now: Places, before: Places) -> None:
        place = named(now, f"layers.14.mlp.up_proj.lora_{part}.")[0]
        place.view(torch.uint8).view(-1)[1] ^= 4

    return plant


ADAPTER: dict[str, Plant] = {
    "none": lambda now, before: None,
    "scale 1.02": scaled(1.02),
    "scale 1.05": scaled(1.05),
    "scale 2": scaled(2.0),
    "first layer lost": lost("layers.0."),
    "middle layer lost": lost("layers.14."),
    "last layer lost": lost("layers.29."),
    "one matrix pair lost": lost("layers.14.mlp.up_proj."),
    "one version stale": stale,
    "no adapter": lost(""),
    "A and B of another layer": misplaced,
    "a byte of A flipped": flipped("A"),
    "a byte of B flipped": flipped("B"),
}


# With right bytes: of the product alone.
PRODUCT = (
    "none", "scale 1.02", "scale 1.05", "first layer lost", "middle layer lost", "last layer lost",
    "one matrix pair lost", "one version stale", "A and B of another layer",
)  # fmt: skip


class Bench:
    """The trainer and its engine, and what is measured under a fault."""

    def __init__(self, trainer: Any, args: Any):
        self.trainer, self.engine, self.model = trainer, trainer.engine, trainer.model
        self.strategy = trainer.bridge.strategy
        self.canary, self.transport = self.strategy.canary, self.strategy.transport
        self.adapter = self.strategy._adapter
        self.debugger = MismatchDebugger(
            self.model, self.engine, self.strategy, trainer.base_check, autocast_dtype(args)
        )
        self.before: dict[str, torch.Tensor] = {}
        self.seed = 0

    def places(self) -> Places:
        placed = self.transport._live.newest
        return placed.slots.places[placed.slot]

    @contextmanager
    def planted(self, plant: Plant, before: Places) -> Iterator[None]:
        now = self.places()
        kept = {name: place.clone() for name, place in now.items()}
        try:
            plant(now, before)
            yield
        finally:
            for name, place in now.items():
                place.copy_(kept[name])

    @contextmanager
    def multiplied(self, plant: Plant, before: Places) -> Iterator[None]:
        """Layers multiply with what is planted, and their buffers hold what was pushed."""
        manager = self.engine.llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager._adapter_manager
        with self.planted(plant, before):
            stacks = [t for layer in manager.modules.values() for t in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
            wrong = {stack.data_ptr(): stack.clone() for stack in stacks}
        multiply = AdapterProducts.__call__

        def wrongly(products: Any, y: Any, x: Any, a: Any, b: Any, *more: Any, **named: Any) -> Any:
            a, b = (tuple(wrong[stack.data_ptr()] for stack in part) for part in (a, b))
            return multiply(products, y, x, a, b, *more, **named)

        AdapterProducts.__call__ = wrongly
        try:
            yield
        finally:
            AdapterProducts.__call__ = multiply

    def held(self) -> bool:
        """At which of four readings the bytes are not what was pushed; 0 at none. Of A each reads some columns."""
        self.adapter.look()
        for i in range(4):
            try:
                self.canary._compare_held(self.adapter.bundle())
            except CanaryError:
                return i + 1
        return 0

    def score(self) -> float:
        return self.canary._difference(self.canary.sequences)

    def probed(self, plant: Plant) -> dict[str, Any]:
        """The canary's difference under the probe, and whether a push would fail for it with bytes that are right."""
        served = {name: place.clone() for name, place in self.places().items()}
        self.adapter.look()
        probe = self.canary.probe(self.adapter)
        self.transport.deliver(probe, self.engine.version + 1, self.engine)
        try:
            with self.planted(plant, served):
                found = {"probe": self.canary._difference(self.canary.sequences, ours=self.canary._ours_probed)}
                self.canary._compare_held = lambda bundle: None
                try:
                    self.canary.check_probe(probe)
                except CanaryError:
                    return found | {"probe_fails": True}
                return found | {"probe_fails": False}
        finally:
            vars(self.canary).pop("_compare_held", None)
            self.transport.revoke(self.engine, self.engine.version)

    def batch(self, prompts: list[list[int]], temperature: float = 1.0) -> Sampled:
        self.seed += 1
        spec = SamplingSpec(32, temperature=temperature, seed=self.seed)
        rollout = self.engine.generate(prompts, spec)
        return Sampled(prompts, rollout.completion_ids, rollout.logprobs)

    def distance(self, sampled: Sampled) -> float:
        return float(self.debugger._scaled(sampled, (1.0,))[1.0].mean())

    def alarm(self, sampled: Sampled, *, hidden: bool) -> dict[str, Any]:
        """What the alarm does with a batch."""
        limit = self.trainer.alarm.threshold
        distance = self.distance(sampled)
        found = {"distance": distance, "threshold": limit}
        if distance > limit:
            if hidden:
                self.debugger._held = lambda: None
            try:
                found["cause"] = self.debugger.examine(sampled, limit).cause
            finally:
                vars(self.debugger).pop("_held", None)
        return found


def base_faults(engine: Any) -> dict[str, Callable[[], Callable[[], None]]]:
    """Each changes the engine's base, and returns what changes it back."""
    model = engine.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
    parameters = dict(model.named_parameters())
    coded = {name: each for name, each in parameters.items() if getattr(each, "bnb_quant_state", None) is not None}
    states = [state for each in coded.values() for state in each.bnb_quant_state.values()]

    def rounded(some: list[Any]) -> Callable[[], None]:
        kept = [state.absmax.clone() for state in some]
        for state in some:
            state.absmax.copy_(state.absmax.bfloat16().float())

        def undo() -> None:
            for state, absmax in zip(some, kept, strict=True):
                state.absmax.copy_(absmax)

        return undo

    def changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
        kept = tensor.clone()
        change(tensor)

        def undo() -> None:
            tensor.copy_(kept)

        return undo

    codes = next(each for name, each in coded.items() if "layers.14.mlp.gate_up" in name)
    norm = next(each for name, each in parameters.items() if "layers.14.post_attention_layernorm" in name)

    def flip(tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8).view(-1)[5] ^= 64

    return {
        "all scales of the base rounded to bf16": lambda: rounded(states),
        "a byte of the codes flipped": lambda: changed(codes.data, flip),
        "a norm of the base 1.05 times as large": lambda: changed(norm.data, lambda t: t.mul_(1.05)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grown", type=float, default=8.0, help="how much larger the older adapter is")
    arguments = parser.parse_args()
    mismatch_debugger._SECONDS = 15.0
    with tempfile.TemporaryDirectory() as home:
        measured(Path(home), arguments)


def measured(home: Path, arguments: Any) -> None:
    """All faults, under the adapter of a few steps and under one that is larger."""
    from peft import LoraConfig

    path = real_model().resolve()
    write_project(home / "project", path)
    config = read_config(
        home / "project" / "run.toml",
        [
            f"run.dir={home / 'run'}",
            f"run.seed={arguments.seed}",
            f"train.max_steps={arguments.steps}",
            "train.save_strategy=no",
        ],
    )
    base, args = prepare_base(path, "nf4"), trl_config(config)
    train, _ = load_data(config.data)
    torch.manual_seed(arguments.seed)
    trainer: Any = QLoRAGRPOTrainer(
        model=base,
        args=args,
        train_dataset=train,
        peft_config=LoraConfig(**LORA),
        reward_funcs=[load_reward(config.rewards[0].use, config.rewards[0].arguments)],
        **(trainer_arguments(config) | {"share_base": False}),
    )
    try:
        trainer.train()
        _planted(trainer, args, train, arguments)
    finally:
        trainer.close()


def _planted(trainer: Any, args: Any, train: Any, arguments: Any) -> None:
    bench = Bench(trainer, args)
    tokenizer = trainer.processing_class
    prompts = [
        tokenizer.apply_chat_template(train[i]["prompt"], add_generation_prompt=True, return_dict=False)
        for i in (0, 1)
        for _ in range(8)
    ]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = described(known | {"canary": bench.canary.threshold, "alarm": trainer.alarm.threshold})

    def keep(age: str, name: str, row: dict[str, Any]) -> None:
        found.setdefault(age, {})[name] = row
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(age, name, row, flush=True)

    before = {name: place.clone() for name, place in bench.places().items()}
    bench.strategy.push()
    age = f"multiplied, {arguments.steps} steps"
    found[f"largest of B, {age}"] = float(max(p.abs().max() for p in named(bench.places(), ".lora_B.")))
    for name in PRODUCT:
        if name not in known.get(age, {}):
            with bench.multiplied(ADAPTER[name], before):
                row = {
                    "held": bench.held(),
                    "canary": bench.score(),
                    "alarm": bench.alarm(bench.batch(prompts), hidden=True),
                }
            keep(age, name, row)
    if arguments.steps != STEPS:
        return
    for age, factor in (("young", 1.0), ("grown", arguments.grown)):
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if ".lora_B." in name:
                    parameter.mul_(factor)
        bench.strategy.push()
        if factor != 1.0:  # the version before is 2 % smaller
            before = {n: p.clone() / (1.02 if ".lora_B." in n else 1.0) for n, p in bench.places().items()}
        found[f"largest of B, {age}"] = float(max(p.abs().max() for p in named(bench.places(), ".lora_B.")))
        for name, plant in ADAPTER.items():
            if name in known.get(age, {}):
                continue
            with bench.planted(plant, before):
                row = {
                    "held": bench.held(),
                    "canary": bench.score(),
                    "alarm": bench.alarm(bench.batch(prompts), hidden=True),
                }
            keep(age, name, row | bench.probed(plant) | {"probe_limit": bench.canary._probe_limit})
    for name, change in base_faults(bench.engine).items():
        if name in known.get("base", {}):
            continue
        undo = change()
        try:
            row = {"canary": bench.score(), "alarm": bench.alarm(bench.batch(prompts), hidden=False)}
            try:
                row["repaired"] = len(verify_base(trainer.model, bench.engine).repaired)
            except BaseMismatchError as error:
                row["verification"] = str(error)[:200]
        finally:
            undo()
        keep("base", name, row)
    for temperature in (1.0, 0.95, 0.9, 0.7):
        sampled = bench.batch(prompts, temperature)
        keep("sampling", f"temperature {temperature}", {"alarm": bench.alarm(sampled, hidden=False)})


if __name__ == "__main__":
    main()
