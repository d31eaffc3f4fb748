"""Many adapters on one base, without a trainer: what is computed is what the definitions say, and nothing is mixed
up."""

import copy
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support import make_model

from qlora_rl import (
    AdapterRejectedError,
    Adapters,
    ConfigConflictError,
    EngineClosedError,
    EngineUnsupportedError,
    SyncError,
    TrainingRow,
    bake_base,
    load_base,
    prepare_base,
)
from qlora_rl.adapter.several import OPTIMIZER
from qlora_rl.adapter.store import CONFIG, WEIGHTS
from qlora_rl.train.scoring.losses import LOSSES, TokenLoss

OPTIONS = {"max_model_length": 64, "max_num_seqs": 64, "max_rank": 8}
SAMPLED = {"max_tokens": 10, "temperature": 1.0, "seed": 3}
PROMPTS = [[40 + i, 41, 42, 43 + i] for i in range(3)]


@pytest.fixture(scope="module")
def float32(tmp_path_factory):
    """What the codes of a tiny 4-bit base stand for, in float32: vLLM multiplies 4-bit weights in 16 bits alone."""
    return bake_base(prepare_base(make_model(tmp_path_factory.mktemp("float32") / "model")), "float32")


@pytest.fixture(scope="module")
def exact(float32):
    with Adapters(float32, max_adapters=3, max_saved=1, tokens=40, share_base=False, **OPTIONS) as adapters:
        yield adapters


@pytest.fixture(scope="module")
def eight(base):
    with Adapters(base, max_adapters=8, **OPTIONS) as adapters:
        for number in range(8):
            adapters.create(f"p{number}", rank=2 + number % 3, seed=number)
            moved(adapters, f"p{number}", seed=number)
            adapters.push(f"p{number}")
        yield adapters


@pytest.fixture(autouse=True)
def adapters_go(request):
    yield
    if "exact" in request.fixturenames:
        for name in request.getfixturevalue("exact"):
            request.getfixturevalue("exact").drop(name)


def rows_of(seed=0, count=5, longest=30, loss="cross_entropy"):
    """Rows of several lengths, with what the loss takes."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in torch.randint(3, longest, (count,), generator=generator).tolist():
        ids = torch.randint(2, 128, (length + 1,), generator=generator).tolist()
        values = {
            "weights": torch.rand(length, generator=generator).tolist(),
            "logprobs": (-6 * torch.rand(length, generator=generator)).tolist(),
            "advantages": torch.randn(length, generator=generator).tolist(),
        }
        taken = {name: values[name] for name in TokenLoss(loss).inputs}
        found.append(TrainingRow(ids[:-1], ids[1:], taken))
    return found


def moved(adapters, name, seed=0, steps=3):
    """A few steps away from the start, where B is zero."""
    for step in range(steps):
        adapters.forward_backward(name, rows_of(seed=100 * seed + step), "cross_entropy")
        adapters.optim_step(name, learning_rate=1e-2)


def written_out(loss, new, row, low=0.8, high=1.2, beta=0.05):
    """Tinker's documentation, line by line, for one row: logprobs of the targets [T], with gradients."""
    if loss == "cross_entropy":
        return (-new * torch.tensor(row.inputs["weights"])).sum()
    old, advantages = (torch.tensor(row.inputs[name]) for name in ("logprobs", "advantages"))
    ratio = torch.exp(new - old)
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "ppo":
        return -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
    if loss == "cispo":
        return -(ratio.clamp(low, high).detach() * new * advantages).sum()
    return -(new * advantages - 0.5 * beta * (new - old) ** 2).sum()


def by_itself(base, directory, rows, loss, **config):
    """Loss, logprobs and gradients of a PeftModel of its own copy of the base, one row at a time, by plain logits."""
    model = PeftModel.from_pretrained(load_base(base), directory, is_trainable=True)
    total, found = 0.0, []
    for row in rows:
        logits_TV = model(input_ids=torch.tensor([list(row.tokens)])).logits[0].float()
        new_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(list(row.targets))[:, None])[:, 0]
        value = written_out(loss, new_T, row, **config)
        value.backward()
        total, found = total + value.item(), [*found, new_T.detach()]
    gradients = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return total, found, gradients


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_logprobs_and_gradients_are_those_of_the_definitions(exact, float32, tmp_path, loss):
    exact.create("one", rank=4, seed=1)
    moved(exact, "one")
    rows = rows_of(seed=7, loss=loss)
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0} if loss in ("ppo", "cispo") else {}
    found = exact.forward_backward("one", rows, loss, **config)
    exact.save("one", tmp_path / "one")
    total, logprobs, gradients = by_itself(
        float32, tmp_path / "one", rows, loss, **{key.split("_")[1]: value for key, value in config.items()}
    )
    assert found.loss == pytest.approx(total, rel=1e-5)
    for ours, theirs in zip(found.logprobs, logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=1e-5)
    mine = exact.gradients("one")
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (mine[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert exact.forward("one", rows, loss, **config).loss == pytest.approx(found.loss, rel=1e-6)


def test_a_function_of_logprobs_has_the_gradients_of_the_loss_it_spells_out(exact):
    exact.create("one", rank=4, seed=1)
    moved(exact, "one")
    rows = rows_of(seed=8, loss="ppo")
    told = exact.forward_backward("one", rows, "ppo")
    wanted = {name: gradient.clone() for name, gradient in exact.gradients("one").items()}
    exact.zero_grad("one")
    assert set(exact.gradients("one").values()) == {None}
    custom = lambda rows, new: sum(written_out("ppo", each, row) for each, row in zip(new, rows, strict=True))  # noqa: E731
    found = exact.forward_backward("one", rows, custom)
    assert found.loss == pytest.approx(told.loss, rel=1e-5)
    for name, gradient in exact.gradients("one").items():
        assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm()


def test_steps_are_those_of_torchs_adamw_and_gradients_of_several_calls_add_up(exact, float32, tmp_path):
    exact.create("one", rank=4, seed=1)
    moved(exact, "one")
    exact.save("one", tmp_path / "before", optimizer=False)
    model = PeftModel.from_pretrained(load_base(float32), tmp_path / "before", is_trainable=True)
    trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    adam = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    exact.create("two", rank=4, seed=5)
    exact.load("two", tmp_path / "before", optimizer=False)
    for step in range(3):
        rows = rows_of(seed=20 + step, count=4)
        exact.forward_backward("two", rows[:1], "cross_entropy")
        exact.forward_backward("two", rows[1:], "cross_entropy")
        made = exact.optim_step("two", learning_rate=1e-3, grad_clip_norm=0.5, **adam)
        optimizer.zero_grad()
        for row in rows:
            logits_TV = model(input_ids=torch.tensor([list(row.tokens)])).logits[0].float()
            new_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(list(row.targets))[:, None])[:, 0]
            written_out("cross_entropy", new_T, row).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.step()
        assert made["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert made["step"] == 3
    exact.save("two", tmp_path / "after")
    ours = PeftModel.from_pretrained(load_base(float32), tmp_path / "after").state_dict()
    for name, parameter in trained.items():
        held = ours[name.replace(".weight", ".default.weight")]
        # Where a gradient is nearly zero, Adam's first step has the size of the learning rate and a sign of rounding.
        assert (held - parameter).norm() <= 1e-3 * parameter.norm(), name


def test_adapters_trained_in_turns_are_those_trained_one_after_the_other(exact, tmp_path):
    def train(order):
        for name in ("a", "b"):
            exact.create(name, rank=4, seed=ord(name))
        works = {name: iter(()) for name in ("a", "b")}
        for name in order:  # one micro-batch of one, then one of the other
            step = next(works[name], "over")
            if step == "over":
                if any(gradient is not None for gradient in exact.gradients(name).values()):
                    exact.optim_step(name, learning_rate=1e-2)
                works[name] = exact.passes(name, rows_of(seed=ord(name)), TokenLoss("cross_entropy"))
        for name in ("a", "b"):
            for _ in works[name]:
                pass
        weights = {}
        for name in ("a", "b"):
            exact.optim_step(name, learning_rate=1e-2)
            weights[name] = {n: t.clone() for n, t in exact._loras._parameters[exact._of(name).key].items()}
            exact.drop(name)
        return weights

    mixed, apart = train("ab" * 12), train("a" * 12 + "b" * 12)
    assert all(torch.equal(mixed[name][key], apart[name][key]) for name in mixed for key in mixed[name])


def test_a_saved_adapter_goes_on_bit_for_bit(exact, tmp_path):
    exact.create("one", rank=4, seed=1, mlp=False)
    moved(exact, "one")
    exact.save("one", tmp_path / "one")
    exact.open("two", tmp_path / "one")
    for name in ("one", "two"):
        moved(exact, name, seed=5)
    one, two = (exact._loras._parameters[exact._of(name).key] for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert all("self_attn" in key for key in one)
    assert exact._of("two").steps == 6
    (tmp_path / "one" / OPTIMIZER).unlink()
    with pytest.raises(Exception, match="optimizer"):
        exact.load("two", tmp_path / "one")


def test_what_is_wrong_is_rejected_and_changes_nothing(exact):
    exact.create("one", rank=4, seed=1)
    moved(exact, "one")
    exact.forward_backward("one", rows_of(seed=1, loss="ppo"), "ppo")
    before = {name: gradient.clone() for name, gradient in exact.gradients("one").items()}
    row = rows_of(seed=2, count=1, loss="ppo")[0]
    bad = copy.deepcopy(dict(row.inputs))
    bad["advantages"][1] = float("nan")
    for wrong, why in [
        (TrainingRow([], [], {}), "0 tokens"),
        (TrainingRow(list(range(2, 70)), list(range(2, 70)), {}), "at most 64"),
        (TrainingRow(row.tokens, row.targets[1:], row.inputs), "target_tokens"),
        (TrainingRow([128, *row.tokens[1:]], row.targets, row.inputs), "vocabulary"),
        (TrainingRow([-1, *row.tokens[1:]], row.targets, row.inputs), "vocabulary"),
        (TrainingRow(row.tokens, row.targets, bad), "not finite"),
        (TrainingRow(row.tokens, row.targets, {}), "no logprobs"),
        (
            TrainingRow(row.tokens, row.targets, {**row.inputs, "clip_low_threshold": [0.5] * len(row.tokens)}),
            "has clip_low_threshold; this loss takes logprobs and advantages",
        ),
    ]:
        with pytest.raises(ConfigConflictError, match=why):
            exact.forward_backward("one", [*rows_of(seed=3, loss="ppo"), wrong], "ppo")
    for low, high in [(1.2, 0.8), (-0.1, 1.0), (0.8, -1.0), (1.3, 1.2)]:
        with pytest.raises(ConfigConflictError, match="0 <= low <= high"):
            exact.forward_backward("one", [row], "cispo", clip_low_threshold=low, clip_high_threshold=high)
    with pytest.raises(ConfigConflictError, match="not offered"):
        exact.forward_backward("one", [row], "gspo")
    with pytest.raises(ConfigConflictError, match="takes no beta"):
        exact.forward_backward("one", [row], "ppo", beta=1.0)
    after = exact.gradients("one")
    assert all(torch.equal(after[name], before[name]) for name in before)
    for name in ("two", "three"):
        exact.create(name, rank=8)
    with pytest.raises(EngineUnsupportedError, match="max_adapters=3"):
        exact.create("four", rank=8)
    with pytest.raises(ConfigConflictError, match="max_rank=8"):
        exact.create("four", rank=9)
    with pytest.raises(ConfigConflictError, match="never pushed"):
        exact.sample({"one": PROMPTS})
    exact.optim_step("one")
    with pytest.raises(ConfigConflictError, match="no gradients"):
        exact.optim_step("one")


def held_by(adapters, name):
    """Weights and state of the optimizer, copied."""
    key = adapters._of(name).key
    states = adapters._loras._optimizers[key].state
    return [
        each.detach().clone()
        for parameter in adapters._loras._parameters[key].values()
        for each in (parameter, *states.get(parameter, {}).values())
    ]


def test_a_step_that_would_not_be_finite_leaves_weights_and_state(exact):
    exact.create("one", rank=4, seed=1)
    moved(exact, "one")
    before = held_by(exact, "one")
    row = rows_of(count=1)[0]
    count = len(row.tokens)
    far = {"logprobs": [-300.0] * count, "advantages": [1.0] * count}  # PPO's ratio is infinite, and clipped
    for loss, inputs in [
        ("cross_entropy", {"weights": [3e38] * count}),
        ("cross_entropy", {"weights": [1e22] * count}),  # finite, and their squares are not
        ("ppo", far),
    ]:
        exact.forward_backward("one", [TrainingRow(row.tokens, row.targets, inputs)], loss)
        with pytest.raises(ConfigConflictError, match="gradients"):
            exact.optim_step("one")
    nothing = TrainingRow(row.tokens, row.targets, {"weights": [0.0] * count})
    exact.forward_backward("one", [nothing])
    with pytest.raises(ConfigConflictError, match="or the new weights are not finite"):  # the mean / eps
        exact.optim_step("one", beta2=0.0, eps=1.2e-38, learning_rate=1e5)
    assert all(torch.equal(old, new) for old, new in zip(before, held_by(exact, "one"), strict=True))
    exact.create("new", rank=4)
    weights = held_by(exact, "new")
    exact.forward_backward("new", [TrainingRow(row.tokens, row.targets, {"weights": [1e22] * count})])
    with pytest.raises(ConfigConflictError, match="or the new weights are not finite"):
        exact.optim_step("new")
    assert all(torch.equal(old, new) for old, new in zip(weights, held_by(exact, "new"), strict=True))
    exact.forward_backward("one", [nothing])
    for wrong in [
        {"eps": 0.0}, {"eps": -1e-8}, {"eps": 1e-50}, {"weight_decay": -0.1}, {"learning_rate": float("inf")},
        {"learning_rate": float("nan")}, {"learning_rate": -1e-4}, {"eps": float("inf")}, {"beta1": 1.0},
        {"beta2": 1.0}, {"beta2": -0.1}, {"grad_clip_norm": float("nan")}, {"grad_clip_norm": -1.0},
    ]:  # fmt: skip
        with pytest.raises(ConfigConflictError, match=f"{next(iter(wrong))}="):
            exact.optim_step("one", **wrong)
    assert all(torch.equal(old, new) for old, new in zip(before, held_by(exact, "one"), strict=True))
    exact.optim_step("one", eps=1.2e-38, beta1=0.0, beta2=0.0)  # of gradients that are 0
    assert all(each.isfinite().all() for each in held_by(exact, "one"))
    moved(exact, "one", steps=1)


@pytest.mark.parametrize("differs", [{"lora_alpha": 4.0}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 8.0}}])
def test_an_adapter_with_another_scaling_is_not_loaded_and_opens_as_what_it_is(exact, tmp_path, differs):
    exact.create("one", rank=4, alpha=32, seed=1)
    moved(exact, "one")
    exact.save("one", tmp_path / "one")
    config = tmp_path / "one" / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | differs))
    before = held_by(exact, "one")
    with pytest.raises(AdapterRejectedError, match=f"it has {next(iter(differs))}="):
        exact.load("one", tmp_path / "one")
    assert all(torch.equal(old, new) for old, new in zip(before, held_by(exact, "one"), strict=True))
    exact.open("two", tmp_path / "one")
    rows = rows_of(seed=9)
    total, _, _ = by_itself(exact.base.path, tmp_path / "one", rows, "cross_entropy")
    assert exact.forward("two", rows).loss == pytest.approx(total, rel=1e-5)
    assert exact.forward("one", rows).loss != pytest.approx(total, rel=1e-5)


def test_a_batch_of_eight_adapters_has_the_tokens_of_each_alone(eight):
    names = [f"p{number}" for number in range(8)]
    mixed = eight.sample(dict.fromkeys([*names, None], PROMPTS), **SAMPLED)
    alone = {name: eight.sample({name: PROMPTS}, **SAMPLED)[name] for name in [*names, None]}
    assert {name: each.completion_ids for name, each in mixed.items()} == {
        name: each.completion_ids for name, each in alone.items()
    }
    assert len({str(each.completion_ids) for each in alone.values()}) == 9


def test_what_is_sampled_is_what_the_trainer_scores(eight):
    for name in ("p0", "p5"):
        rollout = eight.sample({name: PROMPTS}, **SAMPLED)[name]
        rows = [TrainingRow.of(prompt, ids) for prompt, ids in zip(PROMPTS, rollout.completion_ids, strict=True)]
        ours = eight.forward(name, rows).logprobs
        for mine, prompt, theirs in zip(ours, PROMPTS, rollout.logprobs, strict=True):
            assert (torch.tensor(mine[len(prompt) - 1 :]) - torch.tensor(theirs)).abs().mean() < 0.03  # bf16


def test_an_older_version_is_sampled_from_its_directory(eight, tmp_path):
    eight.save("p1", tmp_path / "old")
    old = eight.sample({"p1": PROMPTS}, **SAMPLED)["p1"]
    for seed in (30, 31):
        moved(eight, "p1", seed=seed)
        eight.push("p1")
    assert eight.sample({"p1": PROMPTS}, **SAMPLED)["p1"].completion_ids != old.completion_ids
    saved = eight.sample_saved(tmp_path / "old", PROMPTS, **SAMPLED)
    assert (saved.completion_ids, saved.logprobs) == (old.completion_ids, old.logprobs)
    eight.save("p2", tmp_path / "other")
    eight.save("p3", tmp_path / "third")
    found = []
    threads = [
        threading.Thread(target=lambda d=d: found.append(eight.sample_saved(tmp_path / d, PROMPTS, **SAMPLED)))
        for d in ("old", "other", "third", "old", "third", "other")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(each.completion_ids) for each in found}) == 3
    assert eight.score(PROMPTS, directory=tmp_path / "other") == eight.score(PROMPTS, "p2")


@pytest.fixture
def saved(exact, tmp_path):
    """Three saved adapters, of whom one at a time can be sampled from, and what each samples."""
    for seed, name in enumerate(("old", "new", "third")):
        exact.create(name, rank=4, seed=seed)
        moved(exact, name, seed=seed)
        exact.save(name, tmp_path / name)
    found = {name: exact.sample_saved(tmp_path / name, PROMPTS, **SAMPLED).completion_ids for name in exact}
    assert len({str(ids) for ids in found.values()}) == 3
    return found


class Held:
    """A lock that one thread gets last, whoever else wants it."""

    def __init__(self, last):
        self.lock, self.last = threading.Lock(), last
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def __enter__(self):
        if threading.current_thread() is self.last:
            self.is_there.set()
            assert self.may_go.wait(60)
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()


def test_whoever_is_first_at_a_saved_adapter_has_it_loaded(exact, saved, tmp_path, monkeypatch):
    found = {}

    def read(reader):
        found[reader] = exact.sample_saved(tmp_path / "new", PROMPTS, **SAMPLED).completion_ids

    first = threading.Thread(target=read, args=("first",))
    monkeypatch.setattr(exact._guests[0], "lock", lock := Held(first))
    first.start()
    assert lock.is_there.wait(60)  # it has said what the lane is to hold, and is held up
    read("second")
    lock.may_go.set()
    first.join()
    assert found == {"first": saved["new"], "second": saved["new"]}


def test_saved_adapters_take_turns(exact, saved, tmp_path):
    order = []

    def read(name):
        order.append((name, exact.sample_saved(tmp_path / name, PROMPTS, **SAMPLED).completion_ids == saved[name]))

    waiting, late = (threading.Thread(target=read, args=(name,)) for name in ("old", "third"))
    with exact._guest(tmp_path / "third"):
        waiting.start()
        while not exact._guests_changed._waiters:
            time.sleep(0.01)
        late.start()
        late.join(2)  # it would find its adapter loaded
    waiting.join()
    late.join()
    assert order == [("old", True), ("third", True)]


def test_an_adapter_is_made_the_same_while_others_are_read_and_sampled(exact, saved, tmp_path):
    """What a seed makes and what a library changes while it builds a model belong to the whole process."""

    exact.drop("third")  # three fit

    def made(number):
        exact.create("made", rank=4, seed=5)
        exact.save("made", tmp_path / f"made-{number}")
        exact.drop("made")
        return (tmp_path / f"made-{number}" / WEIGHTS).read_bytes()

    failed, is_over = [], threading.Event()

    def meanwhile(work):
        try:
            while not is_over.is_set():
                work()
        except Exception as error:
            failed.append(error)

    def read():
        for name in ("old", "new"):  # one place, so that each is loaded again
            exact.sample_saved(tmp_path / name, PROMPTS[:1], max_tokens=2)

    wanted = made(0)
    threads = [
        threading.Thread(target=meanwhile, args=(work,))
        for work in (read, lambda: exact.sample({None: PROMPTS}, max_tokens=20))  # without a seed
    ]
    for thread in threads:
        thread.start()
    try:
        found = [made(number) for number in range(1, 9)]
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert failed == []
    assert found == [wanted] * 8


def test_a_saved_adapter_that_is_written_again_is_read_again(exact, saved, tmp_path):
    def ids():
        return exact.sample_saved(tmp_path / "third", PROMPTS, **SAMPLED).completion_ids

    assert ids() == saved["third"]
    shutil.copyfile(tmp_path / "new" / WEIGHTS, tmp_path / "third" / WEIGHTS)
    assert ids() == saved["new"]
    config = json.loads((tmp_path / "third" / CONFIG).read_text())
    (tmp_path / "third" / CONFIG).write_text(json.dumps(config | {"lora_alpha": 0.25}))
    assert ids() not in (saved["new"], saved["third"])
    shutil.rmtree(tmp_path / "third")
    with pytest.raises(AdapterRejectedError, match="no such directory"):
        ids()


def test_an_adapter_that_goes_frees_its_place(exact):
    exact.create("idle", rank=4)
    moved(exact, "idle")
    exact.push("idle")
    wanted = exact.sample({"idle": PROMPTS}, **SAMPLED)["idle"].completion_ids
    held = exact.engine.llm.llm_engine.list_loras()
    for number in range(5):
        exact.create(f"n{number}", rank=4)
        exact.push(f"n{number}")
        assert exact.sample({f"n{number}": PROMPTS}, max_tokens=2)[f"n{number}"].version == 1
        exact.drop(f"n{number}")
        assert exact.engine.llm.llm_engine.list_loras() == held
    assert exact.sample({"idle": PROMPTS}, **SAMPLED)["idle"].completion_ids == wanted
    with pytest.raises(EngineUnsupportedError, match="belong to 2 lanes"):  # weights would drop every lane's adapter
        exact.engine.load_dense(iter(()), 1)
    assert list(exact) == ["idle"]


def test_numbers_of_numpy_and_torch_do_what_pythons_do(exact, tmp_path):
    exact.create("python", rank=4, alpha=8.0, seed=3)
    exact.create("numpy", rank=np.int64(4), alpha=np.float32(8), seed=np.int64(3))
    for name, as_list, one in (("python", list, float), ("numpy", np.array, torch.tensor)):
        rows = [
            TrainingRow(as_list(row.tokens), as_list(row.targets), {k: as_list(v) for k, v in row.inputs.items()})
            for row in rows_of(seed=4, loss="ppo")
        ]
        exact.forward_backward(name, rows, "ppo", clip_low_threshold=one(0.5))
        exact.optim_step(name, learning_rate=one(1e-2), grad_clip_norm=one(0.5))
        exact.push(name)
        exact.save(name, tmp_path / name)
    one, two = held_by(exact, "python"), held_by(exact, "numpy")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))
    plain = exact.sample({"python": PROMPTS}, **SAMPLED)["python"]
    options = {"max_tokens": np.int64(10), "temperature": np.float32(1), "seed": np.int64(3)}
    for prompts in (np.array(PROMPTS), torch.tensor(PROMPTS), [torch.tensor(each) for each in PROMPTS]):
        found = exact.sample({"numpy": prompts}, **options)["numpy"]
        assert (found.completion_ids, found.logprobs) == (plain.completion_ids, plain.logprobs)


def test_what_peft_has_saved_is_opened_also_out_of_a_runs_directory(exact, float32, tmp_path):
    model = get_peft_model(load_base(float32), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "run" / "adapter")
    rows = rows_of(seed=9)
    total, _, _ = by_itself(float32, tmp_path / "run" / "adapter", rows, "cross_entropy")
    exact.open("one", tmp_path / "run", optimizer=False)
    assert exact.forward("one", rows).loss == pytest.approx(total, rel=1e-5)
    exact.create("two", rank=4, alpha=8.0)
    assert exact.forward("two", rows).loss != pytest.approx(total, rel=1e-5)
    exact.load("two", tmp_path / "run", optimizer=False)
    assert exact.forward("two", rows).loss == pytest.approx(total, rel=1e-5)


def test_a_mistake_is_told_with_the_way_out(exact, tmp_path):
    exact.create("one", rank=4, seed=1)
    exact.save("one", tmp_path / "one", optimizer=False)
    row = rows_of(count=1)[0]
    for attempt, error, why in [
        (lambda: exact.create("one", rank=4), ConfigConflictError, "Drop it, or use another name"),
        (lambda: exact.create("two", rank=9), ConfigConflictError, "larger max_rank"),
        (lambda: exact.forward("two", [row]), ConfigConflictError, "'one'; create and open make one"),
        (lambda: exact.sample(PROMPTS), ConfigConflictError, "sample\\({name: prompts}\\)"),
        (lambda: exact.sample({"one": PROMPTS}), ConfigConflictError, "Call push first"),
        (lambda: exact.save("one", tmp_path / "one"), ConfigConflictError, "Use another name, or remove it"),
        (lambda: exact.load("one", tmp_path / "one"), AdapterRejectedError, "optimizer=False"),
        (lambda: exact.open("two", tmp_path / "none"), AdapterRejectedError, "no such directory"),
        (lambda: exact.load("one", tmp_path), AdapterRejectedError, "holds no adapter"),
    ]:
        with pytest.raises(error, match=why):
            attempt()
    assert list(exact) == ["one"]
    exact.load("one", tmp_path / "one", optimizer=False)
    exact.open("two", tmp_path / "one", optimizer=False)


def test_adapters_that_were_closed_say_so(float32):
    with Adapters(float32, max_adapters=1, max_saved=1, share_base=False, **OPTIONS) as adapters:
        adapters.create("one", rank=4)
    with pytest.raises(EngineClosedError, match="Make new ones"):
        adapters.create("two", rank=4)
    with pytest.raises(EngineClosedError):
        adapters.sample({None: PROMPTS})
    assert adapters.tokenizer.decode(PROMPTS[0])  # what was sampled before can still be read


def test_an_adapter_that_cannot_be_dropped_does_not_keep_the_engine(float32, monkeypatch):
    adapters = Adapters(float32, max_adapters=2, max_saved=1, share_base=False, **OPTIONS)
    for name in ("one", "two"):
        adapters.create(name, rank=4)
    failing = adapters._held["two"].lane

    def fail(*, force=False):
        raise SyncError("closing a lane: it has failed.")

    monkeypatch.setitem(vars(failing), "close", fail)  # what is set on a lane is set on its engine
    with pytest.raises(SyncError):
        adapters.close()
    assert list(adapters) == []
    with pytest.raises(EngineClosedError):
        adapters.engine.generate(PROMPTS)
    adapters.close()


def test_a_stop_ends_sampling_from_several_and_the_adapters_stay(eight, monkeypatch):
    """Ctrl-C, or a notebook's stop button; what another thread samples goes on."""
    wanted = eight.sample({"p3": PROMPTS}, **SAMPLED)["p3"]
    step, steps = eight.engine._driver._step, []

    def struck(engine):
        steps.append(engine)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        step(engine)

    monkeypatch.setattr(eight.engine._driver, "_step", struck)
    many = {f"p{number}": PROMPTS * 100 for number in range(8)}
    with ThreadPoolExecutor(1) as other:
        beside = other.submit(eight.sample, {None: PROMPTS}, max_tokens=50, temperature=0.0, extra={"ignore_eos": True})
        with pytest.raises(KeyboardInterrupt):
            eight.sample(many, max_tokens=50, temperature=1.0, extra={"ignore_eos": True})
        assert [len(ids) for ids in beside.result(60)[None].completion_ids] == [50] * len(PROMPTS)
    assert len(steps) < 900  # of 2400 * 50 / 64 that were asked for
    assert not eight.engine.llm.llm_engine.has_unfinished_requests()
    assert eight.sample({"p3": PROMPTS}, **SAMPLED)["p3"].completion_ids == wanted.completion_ids
