"""A run goes on from its last whole checkpoint as if it had never been stopped; another run is rejected. `FakeEngine`,
one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kinds import lora
from peft import LoraConfig, get_peft_model
from PIL import Image
from resumed import adapter, assert_same_run, lines, make, reward_digits
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerCallback

from qlora_rl import ConfigConflictError, RunDirectoryError, load_base, open_trained, prepare_base
from qlora_rl.adapter.directory import adapter_in
from qlora_rl.adapter.inspected import InspectedAdapter, factors_of
from qlora_rl.adapter.store import ORIGIN
from qlora_rl.train.run import RunDirectory, checkpoints, resume
from qlora_rl.train.run.identity import digest_dataset


class Killed(BaseException):
    """Ends a training without any of the clean-up that an error has."""


class KillAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Killed


def killed(base, out, step, **fields):
    trainer = make(base, out, "fake", **fields)
    trainer.add_callback(KillAt(step))
    with pytest.raises(Killed):
        trainer.train()
    return trainer


def rows(number, first=10):
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{first + i}+{first + i}="} for i in range(number)])


CASES = {
    # steps, saved at, killed before; fields
    "in the first epoch": (6, 3, 5, {}),
    "in the third epoch, in another order than the first": (12, 10, 11, {"train_dataset": rows(8)}),
    "completions of an earlier step": (8, 3, 5, {"num_iterations": 2, "gradient_accumulation_steps": 2,
    "steps_per_generation": 4}),
    "between two lines of the log": (8, 3, 5, {"logging_steps": 2}),
    "evaluation pushes before the checkpoint": (6, 3, 5, {"eval_dataset": rows(2, 60), "eval_strategy": "steps",
    "eval_steps": 3}),
    "bfloat16 adapter": (6, 3, 5, {"adapter_dtype": "bfloat16"}),
    "a penalty against the base": (6, 3, 5, {"beta": 0.1}),
    "a start of twice the rank": (6, 3, 5, {"peft_config": lora(init_lora_weights="pissa_niter_2"),
    "weight_decay": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(case, base, tmp_path, caplog):
    steps, saved, stop, fields = CASES[case]
    fields = {"max_steps": steps, "save_steps": saved, **fields}
    with make(base, tmp_path / "straight", "fake", **fields) as straight:
        whole = straight.train()
    killed(base, tmp_path / "killed", stop, **fields)
    with make(base, tmp_path / "killed", "fake", **fields) as trainer, caplog.at_level("INFO", "qlora_rl.stages"):
        result = trainer.train()
        again = f"; steps up to {stop} are done again" if stop > saved and "logging_steps" not in fields else ""
        assert f"going on from checkpoint-{saved}, step {saved} of {steps}{again}" in caplog.text
        assert trainer.fidelity.history  # it has sampled again
    assert_same_run(tmp_path / "killed", tmp_path / "straight")
    assert result.training_loss == whole.training_loss
    versions = [line["version"] for line in lines(tmp_path / "killed", "sync.jsonl")]
    assert versions == list(range(1, len(versions) + 1))


def test_an_adapter_under_another_name_beside_a_reference_goes_on(base, tmp_path):
    def fields():
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
        return {
            "model": get_peft_model(load_base(base), config),
            "peft_config": None,
            "beta": 0.1,
            "max_steps": 4,
            "save_steps": 2,
        }

    make(base, tmp_path / "straight", "fake", **fields()).train()
    killed(base, tmp_path / "killed", 3, **fields())
    assert (tmp_path / "killed" / "checkpoint-2" / "ref" / "adapter_model.safetensors").exists()
    make(base, tmp_path / "killed", "fake", **fields()).train()
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


def test_the_words_of_transformers_work_too(base, tmp_path):
    fields = {"max_steps": 4, "save_steps": 2}
    make(base, tmp_path / "straight", "fake", **fields).train()
    killed(base, tmp_path / "killed", 3, **fields)
    with make(base, tmp_path / "killed", "fake", existing="continue", **fields) as trainer:
        trainer.train(resume_from_checkpoint=True)
    assert_same_run(tmp_path / "killed", tmp_path / "straight")

    # An earlier one: what came behind it is another future now.
    with make(base, tmp_path / "killed", "fake", **fields | {"save_steps": 1}) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-2"))
    assert [line["step"] for line in lines(tmp_path / "killed")] == [1, 2, 3, 4]
    assert (tmp_path / "killed" / "superseded-checkpoint-4").is_dir()
    assert [d.name for d in checkpoints.numbered(tmp_path / "killed")] == [f"checkpoint-{n}" for n in (2, 3, 4)]

    # Into a new directory: the lines there begin where it began.
    with make(base, tmp_path / "new", "fake", existing="reject", **fields) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert [line["step"] for line in lines(tmp_path / "new")] == [3, 4]
    assert all(
        torch.equal(value, adapter(tmp_path / "straight")[name]) for name, value in adapter(tmp_path / "new").items()
    )
    with pytest.raises(RunDirectoryError, match="checkpoint"):
        make(base, tmp_path / "empty", "fake").train(resume_from_checkpoint=True)


def test_a_finished_run_does_no_step_more_until_it_is_made_longer(base, tmp_path):
    fields = {"save_steps": 2}
    make(base, tmp_path, "fake", max_steps=3, **fields).train()
    assert not (tmp_path / "README.md").exists()  # TRL's card calls a base in a directory "None"
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with make(base, tmp_path, "fake", max_steps=3, **fields) as trainer:
        assert trainer.train().global_step == 3
        assert all(
            torch.equal(p.cpu(), adapter(tmp_path)[n.replace(".default", "")])
            for n, p in trainer.model.named_parameters()
            if ".lora_" in n
        )
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "finished", "steps": 3}
    with make(base, tmp_path, "fake", max_steps=5, logging_steps=1, save_steps=5) as trainer:
        assert trainer.train().global_step == 5
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert (tmp_path / "checkpoint-5").is_dir()
    assert not (tmp_path / "checkpoint-4").exists()  # the intervals are the new ones, not the checkpoint's


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_a_training_without_an_engine_goes_on_too(kind, base, tmp_path):
    from test_offline import KINDS

    trainer, config, table = KINDS[kind]

    def make_offline(name):
        fields = {
            "max_steps": 5,
            "save_steps": 3,
            "logging_steps": 2,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-2,
        }
        fields |= {
            "gradient_checkpointing": False,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": True,
        }
        lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "down_proj"])
        args = config(output_dir=str(tmp_path / name), **fields)
        return trainer(model=base, args=args, train_dataset=table, peft_config=lora, existing_run="resume")

    make_offline("straight").train()
    stopped = make_offline("killed")
    stopped.add_callback(KillAt(4))
    with pytest.raises(Killed):
        stopped.train()
    make_offline("killed").train()
    ours, theirs = adapter(tmp_path / "killed"), adapter(tmp_path / "straight")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert lines(tmp_path / "killed") == lines(tmp_path / "straight")
    assert [line["step"] for line in lines(tmp_path / "killed")] == [1, 2, 3, 4, 5]


def test_another_run_is_rejected_by_name_and_nothing_is_touched(base, apart, other_model_dir, tmp_path):
    make(base, tmp_path, "fake", max_steps=2, save_steps=2).train()
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    others = {
        r"args\.learning_rate was 0\.01 and is 0\.02": {"learning_rate": 0.02},
        r"args\.num_generations was 2 and is 4": {"num_generations": 4},
        "train_dataset was": {"train_dataset": rows(16, 20)},
        r"peft_config\.r was 4 and is 8": {"peft_config": LoraConfig(r=8, lora_alpha=8, lora_dropout=0.1,
        target_modules=["q_proj", "down_proj"])},
        "adapter_dtype was": {"adapter_dtype": "bfloat16"},
        # Made of twice its rank, which is that of the run.
        'start was "plain" and is "pissa"': {"peft_config": LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1,
        target_modules=["q_proj", "down_proj"], init_lora_weights="pissa")},
    }  # fmt: skip
    for wanted, fields in others.items():
        with pytest.raises(ConfigConflictError, match=wanted):
            make(base, tmp_path, "fake", **{"max_steps": 4, **fields})
    with pytest.raises(
        ConfigConflictError,
        match=r"(?s)base was .*args\.temperature was 1\.0 and is 0\.5.*existing_run='overwrite'.*\[run\] existing",
    ):
        make(prepare_base(other_model_dir), tmp_path, "fake", max_steps=4, temperature=0.5)
    with pytest.raises(ConfigConflictError, match="base was"):
        make(apart, tmp_path, "fake", max_steps=4)  # equal but for the last digit of one weight's scales
    with make(base, tmp_path, "fake", existing="continue", max_steps=4, seed=7) as trainer:
        unchanged = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
        with pytest.raises(ConfigConflictError, match=r"args\.seed was 42 and is 7"):
            trainer.train(resume_from_checkpoint=True)
        assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == unchanged
    # "continue" writes what it is; "resume" had rejected before that.
    assert {f for f in before if unchanged[f] != before[f]} <= {
        tmp_path / "config.json",
        tmp_path / "fingerprints.json",
    }


class Anneals(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.set_scale("default", 1.0 / (1 + state.global_step))


def test_factors_that_change_while_it_trains_are_those_of_one_run(base, tmp_path):
    """What counts is how it began."""
    fields = {"max_steps": 3, "save_steps": 1}
    trainer = make(base, tmp_path, "fake", **fields)
    trainer.add_callback(Anneals())
    trainer.add_callback(KillAt(2))
    with pytest.raises(Killed):
        trainer.train()
    with make(base, tmp_path, "fake", **fields) as trainer:
        trainer.add_callback(Anneals())
        trainer.train()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_run_under_other_factors_is_another_run(base, tmp_path):
    fields = {"max_steps": 3, "save_steps": 2}
    killed(base, tmp_path, 2, **fields, **under_the_name("default", base, 3.0))
    with pytest.raises(ConfigConflictError, match=r"factors was 6\.0 and is 2\.0 .*set_scale"):
        make(base, tmp_path, "fake", **fields, **under_the_name("default", base))
    one = under_the_name("default", base, 3.0)
    one["model"].get_base_model().model.layers[1].mlp.down_proj.set_scale("default", 1.0)
    with pytest.raises(ConfigConflictError, match=r"factors was 6\.0 and is \["):
        make(base, tmp_path, "fake", **fields, **one)

    state = tmp_path / "checkpoint-2" / resume.STATE
    of_an_earlier_version = json.loads(state.read_text())
    assert of_an_earlier_version["identity"].pop("factors") == 6.0
    state.write_text(json.dumps(of_an_earlier_version))
    make(base, tmp_path, "fake", **fields, **under_the_name("default", base, 3.0)).close()


def test_a_torn_checkpoint_is_skipped_and_named(base, tmp_path, caplog):
    killed(base, tmp_path, 5, max_steps=6, save_steps=2)
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"half")
    with make(base, tmp_path, "fake", max_steps=6, save_steps=2) as trainer:
        trainer.train()
    assert "checkpoint-4 is skipped: optimizer.pt is not what was written" in caplog.text
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert not any(checkpoints.damage(d) for d in checkpoints.numbered(tmp_path))  # it was written anew

    (tmp_path / "checkpoint-6" / "manifest.json").unlink()
    with (
        make(base, tmp_path, "fake", max_steps=6) as trainer,
        pytest.raises(RunDirectoryError, match=r"no manifest\.json"),
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_a_run_without_a_checkpoint_begins_anew_unless_it_would_lose_something(base, tmp_path):
    killed(base, tmp_path, 2, max_steps=3, save_steps=10)
    assert len(lines(tmp_path)) == 2
    with make(base, tmp_path, "fake", max_steps=3, save_strategy="no") as trainer:
        trainer.train()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert len(lines(tmp_path, "sync.jsonl")) == 3
    with pytest.raises(RunDirectoryError, match="step 3"):
        make(base, tmp_path, "fake", max_steps=4)
    assert adapter(tmp_path)


def test_a_checkpoint_without_the_optimizer_is_no_place_to_go_on_from(base, tmp_path):
    killed(base, tmp_path, 3, max_steps=4, save_steps=2, save_only_model=True)
    with (
        make(base, tmp_path, "fake", max_steps=4) as trainer,
        pytest.raises(RunDirectoryError, match="save_only_model=True"),
    ):
        trainer.train()
    assert len(lines(tmp_path)) == 3


def test_only_so_many_checkpoints_stay_and_the_best(base, tmp_path):
    fields = {
        "eval_dataset": rows(2, 60),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 2,
    }
    scores = iter([0.0, 1.0, 0.0, 0.0, 0.0])

    def best_at_two(completions, **_):
        return reward_digits(completions)

    with make(
        base,
        tmp_path,
        "fake",
        max_steps=4,
        reward=best_at_two,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        load_best_model_at_end=True,
        **fields,
    ) as trainer:
        evaluate = trainer.evaluate
        trainer.evaluate = lambda *a, **k: evaluate(*a, **k) | {"eval_loss": next(scores)}
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert [d.name for d in checkpoints.numbered(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")


def under_the_name(name, base, scale=1.0):
    """Fields of `make`: a model with an adapter of that name, and a factor that its config does not say."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(load_base(base), config, adapter_name=name)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale(name, scale)
    return {"model": model, "peft_config": None}


@pytest.mark.parametrize(("name", "dtype"), [("policy", "float32"), ("default", "bfloat16"), ("policy", "bfloat16")])
def test_the_best_adapter_is_what_is_left_whatever_its_name_and_dtype(name, dtype, base, tmp_path):
    fields = {"eval_dataset": rows(2, 60), "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 2}
    fields |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    scores = iter([1.0, 0.0])
    given = under_the_name(name, base) | {"adapter_dtype": dtype}
    with make(base, tmp_path, "fake", **given, **fields) as trainer:
        evaluate = trainer.evaluate
        trainer.evaluate = lambda *a, **k: evaluate(*a, **k) | {"eval_loss": next(scores)}
        trainer.train()
    best, last = (
        load_file(next((tmp_path / f"checkpoint-{step}").rglob("adapter_model.safetensors"))) for step in (1, 2)
    )
    left = adapter(tmp_path)
    assert {str(value.dtype) for value in left.values()} == {f"torch.{dtype}"}
    assert left.keys() == best.keys()
    assert all(torch.equal(left[key], best[key]) for key in best)
    assert not all(torch.equal(left[key], last[key]) for key in last)


@pytest.mark.parametrize("is_of_an_earlier_version", [False, True])
def test_a_checkpoint_of_an_adapter_under_another_name_is_whole(is_of_an_earlier_version, base, tmp_path, monkeypatch):
    fields = {"max_steps": 4, "save_steps": 2}
    make(base, tmp_path / "straight", "fake", **fields, **under_the_name("policy", base, 3.0)).train()
    if is_of_an_earlier_version:
        monkeypatch.setattr(resume, "place_of", lambda *_: None)
    killed(base, tmp_path / "run", 3, **fields, **under_the_name("policy", base, 3.0))
    monkeypatch.undo()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    for given in (checkpoint, checkpoint / "policy"):
        opened = open_trained(given)
        assert (opened.path.name, opened.adapter.name, opened.step) == ("run", "policy", 2)
        assert adapter_in(given) == opened.adapter
    if not is_of_an_earlier_version:
        assert json.loads((checkpoint / "policy" / ORIGIN).read_text()) == {"base_identity": base.identity}
        layers = InspectedAdapter(opened.load(), "default").layers.values()
        assert {factors_of(layer, "default").scale for layer in layers} == {6.0}  # 3 times 8 / 4
    (tmp_path / "run" / "trainer_state.json").touch()  # as `save_state` leaves it; no checkpoint for that
    assert open_trained(checkpoint).step == 2
    make(base, tmp_path / "run", "fake", **fields, **under_the_name("policy", base, 3.0)).train()
    assert_same_run(tmp_path / "run", tmp_path / "straight")
    assert open_trained(tmp_path / "run" / "adapter").step == 4


def test_of_two_adapters_in_a_checkpoint_the_trained_one_is_opened(base, tmp_path):
    given = under_the_name("default", base)
    given["model"].add_adapter("policy", given["model"].peft_config["default"])
    given["model"].set_adapter("policy")
    make(base, tmp_path, "fake", max_steps=1, save_steps=1, **given).train()
    opened = open_trained(tmp_path / "checkpoint-1")
    assert opened.adapter == tmp_path / "checkpoint-1" / "policy"
    saved, left = load_file(opened.adapter / "adapter_model.safetensors"), adapter(tmp_path)
    assert all(torch.equal(saved[key], left[key]) for key in left)


def test_a_full_disk_leaves_the_checkpoints_before_it(base, tmp_path, monkeypatch):
    import errno

    class Full:
        def __init__(self, step):
            self.left = step

        def __call__(self, *arguments):
            self.left -= 1
            if not self.left:
                raise OSError(errno.ENOSPC, "No space left on device")
            return digest(*arguments)

    digest = resume.identity_of
    trainer = make(base, tmp_path, "fake", max_steps=4, save_steps=1)
    monkeypatch.setattr(resume, "identity_of", Full(2))
    with pytest.raises(RunDirectoryError, match=r"checkpoint-2 .*No space left on device"):
        trainer.train()
    assert [d.name for d in checkpoints.numbered(tmp_path)] == ["checkpoint-1"]
    assert not list(tmp_path.glob(".*"))


def test_two_processes_do_not_share_a_run_directory(tmp_path):
    run = RunDirectory(tmp_path / "run")
    code = f"from qlora_rl.train.run import RunDirectory; RunDirectory({str(run.path)!r}, 'resume')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another process trains in" in done.stderr
    del run
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("existing", ["continue", "resume", "overwrite"])
def test_a_run_that_was_killed_is_not_held_by_a_process_that_it_has_forked(tmp_path, existing):
    """A worker of a DataLoader sees only after seconds that its trainer is gone."""
    code = """if True:
        import os, sys, time
        from qlora_rl.train.run import RunDirectory
        run = RunDirectory(sys.argv[1])
        run.append("metrics.jsonl", {"step": 1})
        if not os.fork():
            print(os.getpid(), flush=True)  # it has begun
        time.sleep(60)"""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE, text=True) as trainer:
        forked = int(trainer.stdout.readline())
        try:
            for path in (tmp_path / "run", tmp_path / "link"):
                with pytest.raises(RunDirectoryError, match="another process"):
                    RunDirectory(path, existing)
            trainer.kill()
            trainer.wait()
            os.kill(forked, 0)
            RunDirectory(tmp_path / "link", existing)
        finally:
            trainer.kill()
            os.kill(forked, signal.SIGKILL)


def test_a_run_that_is_resumed_is_the_same_one_for_a_server(tmp_path):
    first = RunDirectory(tmp_path, "resume").session()
    assert RunDirectory(tmp_path, "resume").session() == first
    assert RunDirectory(tmp_path, "overwrite").session() != first


# What a process does that writes `checkpoint-7`, where one of that name is or is not; it kills itself at the n-th time
# that it touches the disk.
WRITES = """
import os, signal, sys
from pathlib import Path
from qlora_rl.train.run.checkpoints import rotate, staged
root, left = Path(sys.argv[1]), int(sys.argv[2])
def count(event, arguments):
    global left
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and str(root) in str(arguments[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
with staged(root, 7) as directory:
    for name in ("a", "b"):
        (directory / name).write_bytes(name.encode() * 1000)
rotate(root, 2)
"""


@pytest.mark.parametrize("there", [(3, 5), (3, 5, 7)])
def test_at_whatever_touch_of_the_disk_it_is_killed_no_checkpoint_is_torn_or_lost(there, tmp_path):
    for moment in range(1, 100):
        root = tmp_path / str(moment)
        for step in there:
            root.mkdir(exist_ok=True)
            with checkpoints.staged(root, step) as directory:
                (directory / "a").write_bytes(b"old")
        done = subprocess.run([sys.executable, "-c", WRITES, str(root), str(moment)], capture_output=True, text=True)
        assert done.returncode in (0, -9), done.stderr
        torn = [d for d in checkpoints.numbered(root) if checkpoints.damage(d)]
        assert not torn, moment
        checkpoints.tidy(root)
        found = checkpoints.last_whole(root)
        assert checkpoints.step_of(found) >= max(there), moment
        assert not list(root.glob(".*"))
        if done.returncode == 0:
            assert [d.name for d in checkpoints.numbered(root)] == ["checkpoint-5", "checkpoint-7"]
            assert (found / "b").read_bytes() == b"b" * 1000
            break
        shutil.rmtree(root)
    assert 10 < moment < 99


def test_the_digest_of_a_dataset_sees_rows_order_and_columns():
    same = digest_dataset(rows(8))
    assert digest_dataset(rows(8)) == same
    others = [rows(9), rows(8, 11), rows(8).select(range(7, -1, -1)), rows(8).rename_column("prompt", "text")]
    assert len({same, *map(digest_dataset, others)}) == 5
    assert digest_dataset(iter([])) is None
    assert digest_dataset([{"prompt": object()}]) == digest_dataset([{"prompt": object()}])  # no address in it
    one, other = ([{"prompt": "1", "image": Image.new("RGB", (4, 4), color)}] for color in ("red", "blue"))
    assert digest_dataset(one) == digest_dataset([{**one[0], "image": one[0]["image"].copy()}]) != digest_dataset(other)


def test_whole_means_every_file_of_the_manifest(tmp_path):
    with checkpoints.staged(tmp_path, 1) as directory:
        (directory / "inner").mkdir()
        (directory / "inner" / "a").write_text("a")
    (found,) = checkpoints.numbered(tmp_path)
    assert checkpoints.damage(found) == []
    (found / "added later").touch()
    assert checkpoints.damage(found) == []
    (found / "inner" / "a").unlink()
    assert checkpoints.damage(found) == [f"{Path('inner') / 'a'} is missing"]
    (found / "manifest.json").write_text("{")
    assert checkpoints.damage(found) == ["its manifest.json cannot be read (JSONDecodeError)"]


def test_an_end_by_torchs_own_kind_of_exception_is_written_down_too(base, tmp_path):
    """That of its sharded checkpoints is no Exception."""
    trainer = make(base, tmp_path, "fake", max_steps=3, save_strategy="no")

    class Struck(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                raise CheckpointException("reading", {})

    trainer.add_callback(Struck())
    with trainer, pytest.raises(CheckpointException):
        trainer.train()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_several_processes_go_on_with_the_entropy_bonus_too(base, tmp_path, monkeypatch):
    with make(base, tmp_path / "run", "fake", max_steps=1) as trainer:
        (tmp_path / "entropy_ctrl_state.json").write_text('{"entropy_coef": 0.25, "last_world_entropy": 1.5}')
        trainer.use_adaptive_entropy = True
        monkeypatch.setattr(resume, "ranks", lambda: SimpleNamespace(size=2))
        monkeypatch.setattr(resume, "load_optimizer", lambda *_: None)
        trainer._load_optimizer_and_scheduler(str(tmp_path))
        assert (trainer.entropy_coef, trainer._last_world_entropy) == (0.25, 1.5)


@pytest.mark.parametrize("is_there", [False, True], ids=["moved aside", "replaced"])
def test_what_a_kill_leaves_of_the_final_adapter_or_model_is_put_back_or_goes(tmp_path, is_there):
    """Between two renames of `save_adapter` or `save_model`, and after them; what is somebody else's stays."""
    for name in (
        ".adapter-1a2b3c4d-old",
        ".adapter-5e6f7a8b-new",
        ".model-5e6f7a8b-new",
        ".model-1a2b3c4d-old",
        ".adapter-of-mine",
        ".model",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / ".summary.json.4711.tmp").touch()
    if is_there:
        for name in ("adapter", "model"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_text("new")
    RunDirectory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "model", ".adapter-of-mine", ".model"}
    for name, old in (("adapter", ".adapter-1a2b3c4d-old"), ("model", ".model-1a2b3c4d-old")):
        assert (tmp_path / name / "file").read_text() == ("new" if is_there else old)


def test_an_earlier_adapter_that_cannot_be_removed_is_in_no_later_ones_way(tmp_path, base):
    run = RunDirectory(tmp_path / "run")
    policy = get_peft_model(load_base(base), LoraConfig(r=4, target_modules=["q_proj"]))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "adapter").symlink_to(tmp_path / "elsewhere")  # which rmtree leaves alone
    for _ in range(3):
        assert (run.save_adapter(policy) / "adapter_model.safetensors").is_file()
