"""One training as a process, or as one of several under torchrun: its rollouts are recorded, or replayed."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANK = int(os.environ.get("RANK", "0"))


def cpu_as_accelerator() -> None:
    """accelerate knows FSDP and DeepSpeed on accelerators only: here it is told that the CPU is one, over gloo."""
    from accelerate.state import DistributedType, PartialState
    from transformers import training_args

    training_args.is_torch_bf16_gpu_available = lambda: True
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


@functools.cache
def keep_parameters() -> None:
    """On the CPU alone PEFT's DoRA puts a new parameter into a 4-bit layer in each forward pass (`module.weight.to`,
    which copies); ZeRO-3 would know nothing of that one. Here what lies where it is wanted stays what it is."""
    import torch
    from bitsandbytes.nn import Params4bit

    move = Params4bit.to

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        return self if self.bnb_quantized and device == self.device and dtype is None else move(self, *args, **kwargs)

    Params4bit.to = moved


def by_text(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within every group, whoever holds it."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def broken(rank: int, step: int) -> Any:
    """A reward that raises on one rank."""
    calls = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if rank == RANK and len(calls) == step:
            raise ZeroDivisionError("only here")
        return by_text(completions)

    return reward


def takes_weights(engine: type, breaks: tuple[int, int] | None) -> type:
    """An engine of this kind that full weights can be written into; `breaks`: rank and version that never arrives
    whole."""
    from dataclasses import replace

    from qlora_rl import SyncError

    class Dense(engine):
        def capabilities(self) -> Any:
            return replace(super().capabilities(), takes_adapters=False, takes_dense=True, takes_in_place=False)

        @property
        def holds_dense(self) -> bool:
            return bool(self.version) and not self._lost

        def load_dense(self, weights: Any, version: int) -> int:
            places, nbytes = dict(self.model.named_parameters()), 0
            self.version, self._lost = version, f"only a part of version={version} arrived"
            try:
                for name, weight in weights:
                    places.pop(name).data.copy_(weight)
                    nbytes += weight.numel() * weight.element_size()
                    del weight  # or two would be held while the next one is made
                    if breaks == (RANK, version) and "layers.1" in name:
                        raise OSError("the engine is gone")
            except Exception as error:
                raise SyncError(f"loading weights version={version}: {error}. Push again.") from error
            assert not places, f"nothing came for {list(places)}"
            self._lost = ""
            return nbytes

        def withdraw_dense(self, reason: str) -> None:
            self._lost = reason

    return Dense


def replayed(
    base: str, file: Path | None, dense: bool = False, breaks: tuple[int, int] | None = None, spoils: int = 0
) -> Any:
    """An engine that keeps what it samples under its seed and place, or returns what is kept in `file`.

    From the call `spoils` on it reports other logprobs than it has sampled by.
    """
    from qlora_rl import FakeEngine, bake_base, load_base
    from qlora_rl.base.checkpoint import open_base
    from qlora_rl.contracts import Rollout

    if dense and open_base(base).spec.is_4bit:
        base = bake_base(base)

    class Replayed(takes_weights(FakeEngine, breaks) if dense else FakeEngine):
        kept: dict[str, Any] = json.loads(file.read_text()) if file else {}
        calls = 0

        def generate(self, prompts: Any, sampling: Any = None, **fields: Any) -> Any:
            keys = [f"{sampling.seed}:{sampling.first_place + i}" for i in range(len(prompts))]
            if file:
                sampled = [self.kept[key] for key in keys]
                assert [each["prompt"] for each in sampled] == [list(p) for p in prompts]
                self.calls += 1
                off = 1.0 if spoils and self.calls >= spoils else 0.0
                logprobs = [[each - off for each in d["logprobs"]] for d in sampled]
                return Rollout([d["ids"] for d in sampled], logprobs, self.version, 0.01)
            rollout = super().generate(prompts, sampling, **fields)
            for key, prompt, ids, logprobs in zip(keys, prompts, rollout.completion_ids, rollout.logprobs, strict=True):
                self.kept[key] = {"prompt": list(prompt), "ids": ids, "logprobs": logprobs}
            return rollout

    return Replayed(load_base(base), max_model_length=64)


def weigh_pushes(trainer: Any, report: dict[str, Any]) -> None:
    """Note by how many adapters (of full weights: by how many modules, the largest in float32) this rank's tensors grow
    at most during each push; the canary's forward is no part of it."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from qlora_rl.sharded_tensors import shape_of

    strategy = trainer.bridge.strategy
    strategy.canary, push = None, strategy.push
    report["growth"] = []

    def weighed() -> Any:
        tracker, nothing = MemTracker(), {"Total": 0}
        if strategy.mode == "weights":  # which read every weight of one model, and write those of the other
            tracker.track_external(trainer.model, trainer.engine.model)
        before = tracker.get_tracker_snapshot().get(torch.device("cpu"), nothing)["Total"]
        with tracker:
            pushed = push()
        peak = tracker.get_tracker_snapshot("peak").get(torch.device("cpu"), nothing)["Total"] - before
        unit = sum(shape_of(p).numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
        if strategy.mode == "weights":
            unit = 4 * max(p.numel() for p in trainer.engine.model.parameters())
        report["growth"].append(peak / unit)
        return pushed

    strategy.push = weighed


def shares(trainer: Any) -> dict[str, float]:
    """Which part of the base, and of the adapter, lies on this rank."""
    from torch.distributed.tensor import DTensor

    from qlora_rl.sharded_tensors import shape_of

    def held(p: Any) -> int:
        if hasattr(p, "ds_tensor"):
            return p.ds_tensor.numel() + p.numel()  # its part, and itself where it is gathered
        return (p.to_local() if isinstance(p, DTensor) else p).numel()

    found = {}
    for name, is_trained in (("base", False), ("adapter", True)):
        parts = [p for p in trainer.model.parameters() if p.requires_grad is is_trained]
        found[name] = sum(map(held, parts)) / max(1, sum(shape_of(p).numel() for p in parts))
    return found


def prove(trainer: Any, report: dict[str, Any]) -> None:
    """Push what was trained last, and have the engine's weights compared with it, one by one."""
    trainer.sync()
    trainer.bridge.strategy.verify()
    report["held"] = trainer.engine.describe_base().digest
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    report["trained"], report["plan"] = trained, trainer.plan.strategy


def watch_order(trainer: Any, report: dict[str, Any]) -> None:
    """Note what the adapter is at each push, and when what was sampled with it is measured."""
    from qlora_rl.sharded_tensors import whole

    report["pushed"], report["looked"] = [], []
    push, look = trainer.bridge.strategy.push, trainer._look_at

    def adapter() -> float:
        return float(
            sum(w.double().abs().sum() for w in whole([p for p in trainer.model.parameters() if p.requires_grad]))
        )

    def pushed() -> Any:
        report["pushed"].append(adapter())
        return push()

    def looked(*args: Any) -> Any:
        report["looked"].append(adapter())
        return look(*args)

    trainer.bridge.strategy.push, trainer._look_at = pushed, looked


def shared(make: Any) -> str:
    """Where a server would be started, rank 0 makes this engine, and owns it for all ranks."""
    from qlora_rl.engine import compat
    from qlora_rl.train.rollouts import engine_link

    engine_link.start_engine = lambda *_: engine_link._for_all(make)
    compat.require_server = lambda: None  # vLLM may have none: 0.26
    return "server"


def ask_often(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A rollout_func that asks the engine more often on one rank than on another."""
    ids = trainer.processing_class(prompts)["input_ids"]
    for _ in range(1 + 2 * RANK):
        _, completions, logprobs, _ = trainer.vllm_generation.generate(ids)
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[v for (v,) in row] for row in logprobs]}


def note_batches(trainer: Any, report: dict[str, Any]) -> None:
    """Note what this rank trains on in each step, and how many policies ago it was sampled."""
    report["batches"], take = [], trainer._next

    def taken(inputs: Any) -> Any:
        sampled = take(inputs)
        age = trainer._policy - sampled.policy
        prompts = [row["prompt"] for row in inputs]
        report["batches"].append({"step": trainer.state.global_step, "prompts": prompts, "age": age})
        return sampled

    trainer._next = taken


def count_sent(report: dict[str, Any]) -> None:
    """Note how many bytes this rank is sent, or sends, by broadcasts of torch."""
    import torch

    report["sent"], broadcast = 0, torch.distributed.broadcast

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        report["sent"] += tensor.numel() * tensor.element_size()
        return broadcast(tensor, *args, **kwargs)

    torch.distributed.broadcast = counted


def part_all(trainer: Any) -> None:
    """Let ZeRO-3 part small weights, too, which it would leave whole on each rank: all of a tiny model's are."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0


def keep_inputs_on_host() -> Any:
    """Have the trainers keep layer inputs in copies, as on a GPU; returned."""
    from host_copies import HostCopies

    from qlora_rl.train.run import recorded_training
    from qlora_rl.train.setup.layer_inputs import keep_on_host

    copies = HostCopies()
    recorded_training.keep_on_host = functools.partial(keep_on_host, on_host=copies)
    return copies


def strike(trainer: Any, rank: int, step: int, how: str) -> None:
    """End this rank before its backward pass, in which the others wait for it."""
    compute_loss = trainer.compute_loss

    def struck(*args: Any, **kwargs: Any) -> Any:
        if rank == RANK and trainer.state.global_step == step:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("in the middle of a step")
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = struck


def forget(engine: Any, rank: int, push: int) -> None:
    """From that push on the engine of one rank holds nothing."""
    held, asked = engine.held_adapter, []

    def forgotten(*args: Any) -> Any:
        asked.append(1)
        return {} if rank == RANK and len(asked) >= push else held(*args)

    engine.held_adapter = forgotten


def offline(base: str, out: Path, method: str, **fields: Any) -> Any:
    """SFT or DPO on a few sums."""
    from datasets import Dataset
    from peft import LoraConfig
    from support import tiny_training
    from trl import DPOConfig, SFTConfig

    from qlora_rl import QLoRADPOTrainer, QLoRASFTTrainer

    kind, config = {"sft": (QLoRASFTTrainer, SFTConfig), "dpo": (QLoRADPOTrainer, DPOConfig)}[method]
    rows = [{"prompt": f"{10 + i}+{11 + i}=", "chosen": str(21 + 2 * i), "rejected": str(i)} for i in range(32)]
    if method == "sft":
        rows = [{"text": row["prompt"] + row["chosen"]} for row in rows]
    return kind(
        model=base,
        args=config(**tiny_training(output_dir=str(out), **{"bf16": False, "max_length": 32, **fields})),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]) if fields.get("eval_strategy") else None,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]),
    )


def online(base: str, out: Path, engine: Any, method: str, reward: Any, **fields: Any) -> Any:
    """GRPO, also asynchronous, RLOO or online DPO; an engine of the test's own, or a word."""
    from peft import IA3Config, LoraConfig
    from resumed import make
    from trl import GRPOConfig, RLOOConfig

    from qlora_rl import QLoRAAsyncGRPOTrainer, QLoRAGRPOTrainer, QLoRARLOOTrainer

    kinds = {"grpo": (QLoRAGRPOTrainer, GRPOConfig), "rloo": (QLoRARLOOTrainer, RLOOConfig)}
    kinds["async"] = QLoRAAsyncGRPOTrainer, GRPOConfig
    if method == "online_dpo":
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.online_dpo import OnlineDPOConfig

        from qlora_rl import QLoRAOnlineDPOTrainer

        kinds[method] = QLoRAOnlineDPOTrainer, OnlineDPOConfig
        fields = {"max_new_tokens": 4, "max_length": 32, **fields}
    kind, config = kinds[method]
    adapters = {"dora": {"use_dora": True}, "norms": {"modules_to_save": ["norm", "input_layernorm"]}}
    adapter = fields.pop("adapter", "lora")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **adapters.get(adapter, {}))
    if adapter == "ia3":
        lora = IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
    if adapter == "none":
        lora, fields["sync"] = None, "weights"
    fields = {"bf16": False, "peft_config": lora, **fields}
    return make(base, out, engine, reward=reward, trainer=kind, config=config, **fields)


def in_4_bits(model: str, dtype: str = "float32") -> Any:
    """As transformers loads it, multiplied in this dtype."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quant = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(model, quantization_config=quant, dtype=dtype)


class Attached:
    """A GRPOTrainer as somebody builds it who knows TRL alone, with an engine attached; the adapter is left as a run
    leaves it."""

    def __init__(self, base: str, out: Path, engine: Any, reward: Any, **fields: Any):
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        from qlora_rl import attach
        from qlora_rl.base.checkpoint import open_base

        engine_fields = {name: fields.pop(name) for name in ("sync", "canary_every") if name in fields}
        fields = {"max_completion_length": 4, "num_generations": 2, "beta": 0.0, "save_strategy": "no", **fields}
        options = {"lr_scheduler_type": "linear", "logging_steps": 1, "learning_rate": 1e-2, "report_to": []}
        options |= {"gradient_checkpointing": False, "disable_tqdm": True, "use_cpu": True, "bf16": False}
        self.out, model = out, in_4_bits(fields.pop("model"), fields.pop("dtype", "float32"))
        self.trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(output_dir=str(out), **options | fields),
            processing_class=AutoTokenizer.from_pretrained(open_base(base).path, padding_side="left"),
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": f"{10 + i}+{11 + i}="} for i in range(16)]),
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]),
        )
        for parameter in self.trainer.model.parameters():
            if parameter.requires_grad:  # TRL has rounded it to bfloat16
                parameter.data = parameter.data.float()
        self.held = attach(self.trainer, rollout=engine, **engine_fields)
        self.bridge, self.engine = self.held.bridge, self.held.engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.held.close()

    def train(self) -> None:
        from peft.utils import get_peft_model_state_dict
        from safetensors.torch import save_file

        from qlora_rl.train.ranks.sharded import trained_weights

        self.trainer.train()
        self.trainer.save_model(str(self.out / "saved"))
        trained = trained_weights(self.trainer.model)
        tensors = get_peft_model_state_dict(self.trainer.model, state_dict=trained)
        if RANK == 0:
            (self.out / "adapter").mkdir(parents=True)
            save_file(
                {n: t.contiguous().cpu() for n, t in tensors.items()},
                self.out / "adapter" / "adapter_model.safetensors",
            )
            log = [entry for entry in self.trainer.state.log_history if "reward" in entry]
            (self.out / "metrics.jsonl").write_text("\n".join(map(json.dumps, log)))


def main(call: dict[str, Any]) -> None:
    """Train as `call` says; what happened to this rank is left in `<out>-rank<N>.json`."""
    import torch
    from resumed import reward_digits

    from qlora_rl import QloraRLError

    out, base = Path(call.pop("out")), call.pop("base")
    kept, struck, fails = call.pop("kept", None), call.pop("strike", None), call.pop("fails", None)
    forgets = call.pop("forgets", None)
    record, method = call.pop("record", None), call.pop("method", "grpo")
    weighs, learns, proves = call.pop("weighs", False), call.pop("learns", False), call.pop("proves", False)
    dense, breaks = call.get("adapter", "lora") != "lora", tuple(call.pop("breaks", ())) or None
    watches, parts, spoils = call.pop("watches", False), call.pop("parts", False), call.pop("spoils", 0)
    torch.manual_seed(5)
    report: dict[str, Any] = {"error": None}
    copies = keep_inputs_on_host() if call.pop("offloads", False) else None
    if "true" in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_DEEPSPEED")):
        cpu_as_accelerator()
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            keep_parameters()
        call["use_cpu"] = False
    is_shared, turns = call.pop("shared", False), call.pop("turns", False)
    # As on a sharded base: products with 4-bit weights are bitsandbytes', of which the sums have another order.
    left = call.pop("bitsandbytes", False)
    products = (
        patch("qlora_rl.train.run.recorded_training.apply_linears", return_value={"reason": "a test"})
        if left
        else nullcontext()
    )

    def replay() -> Any:
        return replayed(base, Path(kept) if kept else None, dense, breaks, spoils)

    engine = call.pop("rollout", None) or (shared(replay) if is_shared else replay())
    if forgets:
        forget(engine, *forgets)
    try:
        if method in ("sft", "dpo"):
            trainer = offline(base, out, method, **call)
        elif method == "attach":
            trainer = Attached(base, out, engine, broken(*fails) if fails else by_text, **call)
        else:
            reward = broken(*fails) if fails else reward_digits if learns else by_text
            with products:
                trainer = online(base, out, engine, method, reward, **call)
        with trainer:
            if struck:
                strike(trainer, **struck)
            if weighs:
                weigh_pushes(trainer, report)
            if watches:
                watch_order(trainer, report)
                count_sent(report)
            if method == "async":
                note_batches(trainer, report)
            if turns:
                trainer.rollout_func = ask_often
            if parts:
                part_all(trainer)
            trainer.train()
            report["shares"] = shares(trainer)
            report["inputs_on_host"] = len(copies.sent) if copies else 0
            if proves:
                prove(trainer, report)
        report["pushes"] = trainer.bridge._pushed[0] if hasattr(trainer, "bridge") else 0
        report["owns_engine"] = (
            hasattr(trainer, "engine") and getattr(trainer.engine, "inner", trainer.engine) is not None
        )
    except BaseException as error:
        report["error"] = f"{type(error).__name__}: {error}"
        report["notes"] = getattr(error, "__notes__", [])
        if not isinstance(error, QloraRLError | ValueError):
            raise
    finally:
        Path(f"{out}-rank{RANK}.json").write_text(json.dumps(report))
        if record:
            Path(record).write_text(json.dumps(engine.kept))


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        main(each)
