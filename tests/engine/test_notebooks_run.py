"""The notebooks run, and what they show is so."""

import json
from pathlib import Path

import nbformat
import pytest
from support import program

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = program("scripts/notebooks.py")

# What is asked of the kernel when all cells have run.
ASKED = {
    "101": "{'states': [as_loaded.state, repaired.state], 'named': in_memory.module, 'disk': on_disk.reasons, 'weights': len(errors)}",
    "100": "{'before': accuracy_before, 'after': accuracy_after, 'kl': steps['mismatch_kl'].median(), 'steps': len(steps)}",
    "102": "{'before': accuracy_before, 'after': accuracy_after, 'kl': steps['mismatch_kl'].median(), 'steps': len(steps),"
    " 'rewards': {name: [part[f'rewards/{name}/mean'].mean() for part in (steps.head(5), steps.tail(5))]"
    " for name in ('numeric_match', 'in_form')}, 'exported': done.distance.kl_mean}",
    "103": "{'eval': learned, 'kl': exported['distance']['kl_mean'],"
    " 'files': sorted(path.name for path in Path('runs/103').glob('*.json*'))}",
    "104": "{'accuracy': list(accuracy.values()), 'kl': done.distance.kl_mean}",
    "201": "{'steps': [len(lines(out, 'metrics')) for out in runs.values()], 'lost': type(lost).__name__,"
    " 'ends': [process.poll() is not None for process in (beside.process, served.process)],"
    " 'kl': [lines(out, 'metrics')['mismatch_kl'].median() for out in runs.values()],"
    " 'waited': lines(runs['killed, and back'], 'metrics')['step_seconds'].idxmax()}",
    "203": "{'verdicts': [found.kind for found in verdicts.values()], 'code': done.returncode, 'runs': {name: {"
    "'strategy': run['plan'].strategy, 'before': run['steps']['reward'].head(5).mean(),"
    " 'after': run['steps']['reward'].tail(5).mean(), 'kl': run['steps']['mismatch_kl'].median()} for name, run in runs.items()}}",
    "204": "{'fits': estimate.fits, 'longest': longest.to_dict(), 'too big': too_big.fits, 'advice': advice.fits, "
    "'equal': is_equal,"
    " 'bytes': [counted['base, trainer'], nbytes(copied)]}",
    "205": "{'steps': len(steps), 'calls': [part['tools/call_frequency'].mean() for part in (first, last)],"
    " 'right': [part['reward'].mean() for part in (first, last)], 'failed': last['tools/failure_frequency'].mean(),"
    " 'kl': steps['mismatch_kl'].median()}",
    "206": "{'before': accuracy['before'], 'after': accuracy['after'], 'kl': steps['mismatch_kl'].max(), 'steps': len(steps)}",
    "207": "{'before': shares['before'], 'taught': shares['before, with the examples'], 'after': shares['after'],"
    " 'smaller': shares['after, rank 4'], 'sizes': sizes[4] / sizes[16],"
    " 'kl': steps['mismatch_kl'].median(), 'loss': [steps['loss'].head(3).mean(), steps['loss'].tail(3).mean()]}",
    "301": "{'found': {bug.__name__: [first_fault(alarms[letter])[0], getattr(first_fault(alarms[letter])[1], 'cause', None)]"
    " for letter, bug in runs.items()}, 'stopped': stopped.cause, 'rejected': type(rejected).__name__}",
    "302": "{name: {'seconds': seconds(way, 'step_seconds'), 'age': int(way['steps'].get('staleness_max', pd.Series([0])).max()),"
    " 'kl': way['steps']['mismatch_kl'].median(), 'reward': way['steps']['reward'].tail(5).mean()} for name, way in ways.items()}",
    "303": "{'pushes': list(pushes['version']), 'steps': len(steps), 'runs': len(list(out.rglob('summary.json'))), 'ranks': said.count('its engine'),"
    " 'same': [rollout.completion_ids == whole.completion_ids and rollout.logprobs == whole.logprobs for rollout in "
    "(without, back)], 'who': who.to_dict(), 'states': states, 'versions': [whole.version, back.version, "
    "found['version']],"
    " 'travelled': list(table['bytes of a push']), 'differ': [difference.mean().item() for difference in differences.values()]}",
    "304": "{'steps': len(curves), 'first': curves[0], 'last': smooth.iloc[-1].to_dict(), 'accuracy': list(accuracy.values()),"
    " 'rates': {name: rate for name, (rate, _) in runs.items()}, 'best': accuracy[best], 'pushes': len(reports),"
    " 'same': from_disk.completion_ids == answers[best].completion_ids, 'peft': said[0, ids.shape[1] :].tolist() =="
    " from_disk.completion_ids[shown]}",
    "202": "[{'before': way['marks'].iloc[0], 'after': way['marks'].iloc[-1], 'changed': way['changed'], 'kl': way['steps']['mismatch_kl'].median()}"
    " for way in (merged, adapter)]",
}


def load(number):
    (path,) = (ROOT / "examples" / "notebooks").glob(f"{number}-*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    del notebook.cells[1]  # installs the package where it is missing
    return notebook


def ask(expression):
    return nbformat.v4.new_code_cell(f"import json; print('asked:', json.dumps({expression}))")


def answers(notebook):
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    return [
        json.loads(line.partition(" ")[2]) for text in texts for line in text.splitlines() if line.startswith("asked: ")
    ]


def test_a_first_grpo_run_learns_on_another_model_and_with_fewer_steps(with_demo_model, tmp_path):
    """As somebody would run it who changes the first cell: here to a copy of the demo's model."""
    model = str(tmp_path / "model")
    notebook = load("100")
    changes = (
        f"from qlora_rl.demo.tiny_model import make_tiny_model\nMODEL, STEPS = str(make_tiny_model({model!r})), 25\n"
    )
    notebook.cells.insert(3, nbformat.v4.new_code_cell(changes))  # behind the cell that keeps the libraries quiet
    notebook.cells.append(ask(ASKED["100"]))
    SCRIPT.execute(notebook, tmp_path, with_demo_model)
    (got,) = answers(notebook)
    assert got["steps"] == 25
    assert got["after"] > got["before"] + 0.15
    assert got["kl"] < 1e-3
    printed = [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "stream"]
    assert not [o.text for o in printed if o.name != "stdout"]
    assert "training: step 25/25" in "".join(o.text for o in printed)
    assert (tmp_path / "runs/100/report.html").exists()


@pytest.mark.full  # each of them whole; by default 100, above, and their stored outputs in unit/test_notebooks.py
@pytest.mark.parametrize("number", sorted(ASKED))
def test_every_notebook_runs_shows_what_it_says_and_runs_again_in_the_same_kernel(number, tmp_path):
    notebook = load(number)
    again = [cell for cell in load(number).cells if cell.cell_type == "code"]
    notebook.cells += [ask(ASKED[number]), again[0], nbformat.v4.new_code_cell("STEPS = 3"), *again[1:]]
    SCRIPT.execute(notebook, tmp_path)
    (got,) = answers(notebook)
    if number == "101":
        assert got["states"] == ["repairable", "equal"]
        assert got["named"] == "model.layers.1.mlp.down_proj.weight"
        assert got["disk"] == ["model.safetensors: its bytes differ from what was prepared"]
        assert got["weights"] >= 19  # an offset may happen to be a bf16 number
    elif number == "102":
        assert got["after"] > got["before"] + 0.2
        assert all(late > early + 0.2 for early, late in got["rewards"].values())
        assert got["kl"] < 1e-3
        assert 0 <= got["exported"] < 1e-3
    elif number == "100":
        assert got["after"] > 0.8 > 0.5 > got["before"]
        assert got["kl"] < 2e-4
    elif number == "103":
        assert got["eval"]["policy"]["value"] > 0.3 > 0.15 > got["eval"]["base"]["value"]
        assert got["kl"] < 3e-2  # a real model's rounding
        assert {"config.json", "metrics.jsonl", "summary.json"} <= {*got["files"]}
    elif number == "104":
        base, trained, exported = got["accuracy"]
        assert trained > 0.7 > 0.5 > base
        assert exported == pytest.approx(trained, abs=0.02)  # 16-bit rounding may tip a sum that is nearly a tie
        assert 0 <= got["kl"] < 1e-3
    elif number == "201":
        assert got["steps"] == [12, 12, 12]
        assert got["lost"] == "EngineBrokenError"
        assert got["ends"] == [True, True]
        assert got["waited"] == 6  # the step in which the server was killed
        assert max(got["kl"]) < 1e-3
    elif number == "203":
        adapter, full, reject = "adapter", "full_weights", "reject"
        assert got["verdicts"] == [adapter, adapter, full, full, full, reject, reject]
        assert got["code"] == 3
        kinds = {name: run["strategy"] for name, run in got["runs"].items()}
        assert kinds == {"LoRA": "lora_adapter", "DoRA": "weights", "IA3": "weights", "PiSSA": "lora_adapter"}
        assert all(run["after"] > run["before"] + 0.1 and run["kl"] < 1e-3 for run in got["runs"].values())
    elif number == "204":
        check_the_plans(got)
    elif number == "205":
        (before, after), (wrong, right) = got["calls"], got["right"]
        assert got["steps"] == 30
        assert after > 0.7 > 0.45 > before
        assert right > wrong + 0.3
        assert got["failed"] < 0.1
        assert got["kl"] < 1e-4
    elif number == "206":
        assert got["steps"] == 200
        assert got["after"] > got["before"] + 0.4  # measured: 0.35 -> 0.86
        assert got["kl"] < 1e-3
    elif number == "304":
        (loop,) = (cell.source for cell in again if "def train(steps)" in cell.source)
        assert len(loop.splitlines()) <= 60
        quick, slow = (
            [got["last"][name] for name, rate in got["rates"].items() if rate == wanted] for wanted in (1e-3, 1e-4)
        )
        assert (got["steps"], got["pushes"], len(quick), len(slow)) == (30, 180, 3, 3)
        assert min(quick) > max(slow)
        assert sum(quick) / 3 > sum(slow) / 3 + 0.15
        assert got["best"] == max(got["accuracy"]) > got["accuracy"][0] + 0.3
        assert (got["same"], got["peft"]) == (True, True)
        # Before its first step an adapter changes nothing: a seed has the same questions, and the same answers.
        first = [{seed: got["first"][f"rate {rate:g}, seed {seed}"] for seed in range(3)} for rate in (1e-3, 1e-4)]
        assert first[0] == first[1]
    elif number == "207":
        assert got["taught"] >= 0.9 > 0.1 >= got["before"]
        assert got["after"] >= 0.8
        assert got["smaller"] >= 0.1  # measured: 0.3 in 16 steps
        assert got["sizes"] == 0.25
        assert got["loss"][1] < 0.5 * got["loss"][0]
        assert got["kl"] < 1e-2  # what bfloat16 rounds in this model; GRPO's is the same
    elif number == "301":
        causes = {"twice_as_strong": "scale", "an_old_one": "stale", "one_layer_lost": "layer"}
        assert got["found"] == {name: [9, cause] for name, cause in causes.items()} | {"nothing": [None, None]}
        assert (got["stopped"], got["rejected"]) == ("layer", "CanaryError")
    elif number == "302":
        sequential, one, four = got.values()
        assert [way["age"] for way in (sequential, one, four)] == [0, 1, 4]
        assert sequential["kl"] < min(one["kl"], four["kl"])
        assert max(one["seconds"], four["seconds"]) < sequential["seconds"]
        assert min(sequential["reward"], one["reward"]) > 0.65
        assert four["reward"] > 0.4  # old rollouts teach less
    elif number == "303":
        check_what_travelled(got)
    else:
        merged, adapter = got
        assert merged["before"] == adapter["before"]
        assert adapter["after"] > adapter["before"] + 0.3 > merged["after"] + 0.3
        assert merged["kl"] > 1e3 * adapter["kl"]
        assert (merged["changed"], adapter["changed"]) == (21, 0)


def check_what_travelled(got):
    assert got["pushes"] == list(range(1, got["steps"] + 1))
    assert (got["runs"], got["ranks"]) == (1, 2)
    assert got["same"] == [True, True]
    whole, one, _ = (got["who"][sample] for sample in ("both there", "one killed", "replaced"))
    assert min(whole.values()) > 0 == one["actor 1"]
    assert one["actor 0"] == sum(whole.values())
    assert got["states"] == {
        "version": [1, 1],
        "incarnation": [1, 2],
        "another process": [False, True],
        "holds what the first holds": [True, True],
    }
    assert got["versions"] == [1, 1, 1]
    assert min(got["travelled"]) > 0
    between_engines, from_the_trainer, by_training = got["differ"]
    assert between_engines < 1e-6
    assert from_the_trainer < by_training / 10


def check_the_plans(got):
    assert (got["fits"], got["too big"], got["advice"], got["equal"]) == (True, False, True, True)
    for lengths in got["longest"].values():
        two, one, sleeping, decided = lengths.values()
        assert two < one < sleeping <= decided
    counted, held = got["bytes"]
    assert 0 <= counted - held < 1024  # the trainer's buffers


def test_a_big_model_is_planned_from_its_config_and_two_lines_are_counted_right(with_demo_model, tmp_path):
    notebook = load("204")
    notebook.cells.append(ask(ASKED["204"]))
    SCRIPT.execute(notebook, tmp_path, with_demo_model)
    check_the_plans(*answers(notebook))


STOP = """
import os, signal, threading
from qlora_rl import QLoRAGRPOTrainer
kept, calls = QLoRAGRPOTrainer._generate_and_score_completions, []

def struck(self, inputs):
    calls.append(self)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGINT)  # as Jupyter's stop button does
    return kept(self, inputs)

QLoRAGRPOTrainer._generate_and_score_completions = struck
"""
STOPPED = """
status = json.load(open(calls[-1].args.output_dir + "/summary.json"))["status"]
left = [thread.name for thread in threading.enumerate() if "qlora-rl-rollouts" in thread.name]
del QLoRAGRPOTrainer._generate_and_score_completions, calls[:]
"""
STOP_LATER = """
import threading

def strike(file):
    while not file.exists() or file.read_text().count("\\n") < 2:
        time.sleep(0.1)
    os.killpg(0, signal.SIGINT)  # as Jupyter does: everything in the kernel's group

threading.Thread(target=strike, args=[out / "run" / "metrics.jsonl"], daemon=True).start()
"""
LEFT = """
import psutil
left = [each.pid for each in psutil.process_iter() if any("train.py" in word and OUT in word for word in each.cmdline())]
"""
STOPPABLE = {
    "201": "accident = Accident(STEPS // 2, comes_back=True)",
    "203": 'runs["DoRA"] = train(',
    "301": "for letter, bug in runs.items():\n        engine.drop_adapter()",
    "302": "max_staleness=1)",
}


@pytest.mark.full  # most of four notebooks; Ctrl-C in a run is test_demo.py's
@pytest.mark.parametrize("number", sorted(STOPPABLE))
def test_a_cell_that_was_stopped_leaves_nothing_behind_and_can_be_run_again(number, tmp_path):
    notebook = load(number)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (at,) = (i for i, cell in enumerate(cells) if STOPPABLE[number] in cell.source)
    stopped = nbformat.v4.new_code_cell(cells[at].source, metadata={"tags": ["raises-exception"]})
    code = nbformat.v4.new_code_cell
    before = [cells[0], code("STEPS = 12"), *cells[1:at]]
    notebook.cells = [*before, code(STOP), stopped, code(STOPPED), cells[at], ask("{'status': status, 'left': left}")]
    SCRIPT.execute(notebook, tmp_path)
    (error,) = (o for o in stopped.outputs if o.output_type == "error")
    assert error.ename == "KeyboardInterrupt"
    assert answers(notebook) == [{"status": "interrupted", "left": []}]


@pytest.mark.full  # as above
def test_a_launch_that_was_stopped_leaves_no_process_and_can_be_run_again(tmp_path):
    notebook = load("303")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (at,) = (i for i, cell in enumerate(cells) if "accelerate.commands.launch" in cell.source)
    stopped = nbformat.v4.new_code_cell(cells[at].source, metadata={"tags": ["raises-exception"]})
    code = nbformat.v4.new_code_cell
    notebook.cells = [cells[0], code("STEPS = 8"), *cells[1:at], code(STOP_LATER), stopped, code(LEFT), cells[at]]
    notebook.cells.append(ask("{'left': left, 'steps': (out / 'run' / 'metrics.jsonl').read_text().count(chr(10))}"))
    SCRIPT.execute(notebook, tmp_path)
    (error,) = (o for o in stopped.outputs if o.output_type == "error")
    assert error.ename == "KeyboardInterrupt"
    assert answers(notebook) == [{"left": [], "steps": 8}]


@pytest.mark.full  # as above
def test_a_training_cell_that_was_stopped_can_be_run_again(tmp_path):
    notebook = load("100")
    (training,) = (i for i, cell in enumerate(notebook.cells) if "with QLoRAGRPOTrainer" in cell.source)
    mine = "reward_kept, calls = reward, []\n\ndef reward(completions, **columns):\n    calls.append(1)\n"
    mine += "    if len(calls) == 4:\n        raise KeyboardInterrupt\n    return reward_kept(completions, **columns)\n"
    stopped = nbformat.v4.new_code_cell(notebook.cells[training].source, metadata={"tags": ["raises-exception"]})
    after = nbformat.v4.new_code_cell(
        "assert len(calls) == 4\nstatus = json.load(open(OUT + '/summary.json'))['status']\nreward = reward_kept"
    )
    notebook.cells[training:training] = [nbformat.v4.new_code_cell(mine), stopped, after]
    notebook.cells.insert(2, nbformat.v4.new_code_cell("STEPS = 8"))
    notebook.cells.append(ask("{'steps': len(steps), 'status': status}"))
    SCRIPT.execute(notebook, tmp_path)
    assert answers(notebook) == [{"steps": 8, "status": "interrupted"}]
