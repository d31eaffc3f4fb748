"""Each switch that saves memory alone, and all of them, end with the adapter that none of them gives; with alarm,
one-pass scoring, importance sampling and tool masks. Float32, one process, no vLLM."""

import json
import shutil
from functools import partial

import pytest
import torch
from datasets import Dataset
from host_copies import HostCopies
from peft import LoraConfig
from recorded import Recorded
from support import STEPS, make_model, randomise
from test_arguments import Scripted, add, call
from test_single_forward import offset
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template

from qlora_rl import load_base, prepare_base
from qlora_rl.contracts import Rollout
from qlora_rl.train.run import recorded_training
from qlora_rl.train.setup import tiled_mlp as tiles_module
from qlora_rl.train.setup.layer_inputs import keep_on_host
from qlora_rl.train.single_forward import SingleForward

ALL = ("no padding", "tiles", "layer inputs", "sleep")
MIXED = Dataset.from_list([{"prompt": "+".join(str(n) for n in range(1, 2 + i % 5)) + "="} for i in range(40)])
CHATS = Dataset.from_list([{"prompt": [{"role": "user", "content": "3+4?" * (1 + i % 3)}]} for i in range(8)])


@pytest.fixture
def switched(monkeypatch, make_trainer, config, tmp_path):
    """Train with some switches on; the adapter, and what was seen of each switch."""

    def run(name, on, fields, **arguments):
        copies = HostCopies()
        monkeypatch.setattr(recorded_training, "keep_on_host", partial(keep_on_host, on_host=copies))
        monkeypatch.setattr(tiles_module, "TILE", {"cpu": 8 if "tiles" in on else 2**20})
        tiles = []
        backward = tiles_module._Tiles.backward
        monkeypatch.setattr(tiles_module._Tiles, "backward", lambda *given: tiles.append(1) or backward(*given))
        args = config(
            output_dir=str(tmp_path / name),
            learning_rate=1e-3,
            seed=5,
            bf16=False,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False, "offload": "layer inputs" in on},
            vllm_enable_sleep_mode="sleep" in on,
            **fields,
        )
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        trainer = make_trainer(args=args, peft_config=lora, remove_padding="no padding" in on, **arguments)
        torch.manual_seed(0)
        randomise(trainer.model)
        assert trainer.alarm is not None
        trainer.train()
        adapter = torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])
        padding = json.loads((trainer.run.path / "config.json").read_text())["padding"]
        seen = {
            "no padding": padding["removed"],
            "tiles": bool(tiles),
            "layer inputs": bool(copies.sent),
            "sleep": getattr(trainer.engine, "naps", 0) > 0,
        }
        return adapter, {switch for switch, is_on in seen.items() if is_on}

    return run


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("on", [*((one,) for one in ALL), ALL], ids=", ".join)
def test_a_switch_changes_no_run_with_alarm_one_pass_and_importance_sampling(
    steps, on, switched, model_dir, monkeypatch, colocate
):
    """The engine's probabilities are a little off, so that importance sampling has something to correct."""
    base = prepare_base(model_dir, "none", compute_dtype="float32")
    monkeypatch.setattr(Recorded, "generate", offset(Recorded.generate, lambda i, j: 5e-4 * ((i + j) % 3 - 1)))
    once = []
    asks = SingleForward._scores_once
    monkeypatch.setattr(SingleForward, "_scores_once", lambda self: once.append(asks(self)) or once[-1])
    fields = {"max_steps": steps, "max_completion_length": 12, "vllm_importance_sampling_clip_max": 1.0002}
    fields["vllm_importance_sampling_mode"] = "token_truncate"
    run = partial(switched, fields=fields, model=base, rollout="colocate", train_dataset=MIXED)
    without, nothing = run("without", ())
    found, seen = run("with", on)
    assert (nothing, seen) == (set(), set(on))
    assert once
    assert all(once)
    assert (found - without).norm() < 1e-5 * without.norm()


class Telling(Scripted):
    """Calls the tool, then answers every second one at greater length; the logprobs are its model's."""

    def generate(self, prompts, sampling=None, **fields):
        self.calls = getattr(self, "calls", 0) + 1
        is_call = self.calls % 2
        lines = [
            call("add", a=3, b=4 + i % 2) if is_call else ("It is 7." + " Surely." * (i % 2)) + "<|im_end|>"
            for i in range(len(prompts))
        ]
        ids = [list(line.encode())[: sampling.max_tokens] for line in lines]
        scores = self.score([[*prompt, *said] for prompt, said in zip(prompts, ids, strict=True)])
        logprobs = [each[len(prompt) - 1 :] for each, prompt in zip(scores, prompts, strict=True)]
        return Rollout(ids, logprobs, self.version, 0.001)


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A float32 base that holds conversations, and its tokenizer with Qwen3's template for tools."""
    source = make_model(tmp_path_factory.mktemp("models") / "talking")
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (source / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.save_pretrained(source)
    base = prepare_base(source, "none", compute_dtype="float32")
    shutil.rmtree(source)
    return base


def by_turns(completions, **_):
    """Alike in every group: where two cancel out, AdamW makes rounding large."""
    return [float(i % 2) for i in range(len(completions))]


@pytest.mark.parametrize("on", [*((one,) for one in ALL[:3]), ALL[:3]], ids=", ".join)
def test_a_switch_changes_no_run_whose_tools_answer(on, switched, talking):
    """Prompts of three lengths; the tokens of the tool's answer are masked, and the conversation is longer than a
    tile."""

    def run(name, on):
        engine = Telling(load_base(talking), max_model_length=4096)
        fields = {"max_steps": 2, "max_completion_length": 400, "num_generations": 2}
        return switched(
            name, on, fields, model=talking, rollout=engine, train_dataset=CHATS, tools=[add], reward_funcs=by_turns
        )

    without, nothing = run("without", ())
    found, seen = run("with", on)
    assert (nothing, seen) == (set(), set(on))
    assert (found - without).norm() < 1e-5 * without.norm()
