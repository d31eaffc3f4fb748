"""Full weights on real vLLM: every kind that they carry is served as the trainer computes it, and a broken push never
half.

float32, two layers, random weights, head and embedding apart: an error shows a thousandfold above the noise of 1e-6.
"""

import copy
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kinds import ADAPTER, FULL_WEIGHTS, lora
from pair import SEQUENCES, Noisy, Pair, breaking, trained
from peft import get_peft_model
from support import make_model, randomise
from torch.multiprocessing.reductions import StorageWeakRef

from qlora_rl import (
    AdapterRejectedError,
    AdapterSync,
    Canary,
    CanaryError,
    DenseSync,
    EngineBrokenError,
    EngineUnsupportedError,
    LocalEngine,
    SyncError,
    bake_base,
    load_base,
    prepare_base,
    verify_base,
)
from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.sync.in_place import InPlaceTransport

EXACT = 1e-5
OPTIONS = {"max_lora_rank": 0, "max_model_length": 32, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def exact(untied, tmp_path_factory):
    """Both sides on the baked float32 form of it."""
    baked = bake_base(untied, "float32")
    with LocalEngine(baked, **OPTIONS) as engine:
        yield Pair(engine, baked, tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("name", [*FULL_WEIGHTS, "plain", "patterns"])
def test_every_kind_that_full_weights_carry_is_served_exactly(exact, name):
    kind = {**ADAPTER, **FULL_WEIGHTS}[name]
    if kind.needs:
        pytest.importorskip(kind.needs, reason=f"PEFT asks for {kind.needs} here")
    model = trained(exact.base, kind)
    report = DenseSync(model, exact.engine).push()
    assert report.mode == "weights"
    assert exact.apart(model) < EXACT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_that_is_tied_follows_the_embedding(tmp_path, dtype):
    """vLLM's CPU backend keeps a packed copy of the head, which its own reload leaves as it was."""
    base = bake_base(prepare_base(make_model(tmp_path / "model", tied=True)), dtype)
    with LocalEngine(base, **OPTIONS) as engine:
        pair = Pair(engine, base, tmp_path)
        noise = pair.apart(pair.base)
        for _ in range(2):
            with torch.no_grad():
                embedding_VH = pair.base.get_input_embeddings().weight
                embedding_VH.copy_(embedding_VH.roll(1, 0))
            engine.load_dense(iter_weights(pair.base, dtype=getattr(torch, dtype)), engine.version + 1)
            assert pair.apart(pair.base) < 4 * noise + EXACT


@pytest.fixture(scope="module")
def noisy(untied):
    with LocalEngine(bake_base(untied), **OPTIONS) as engine:
        yield Noisy(engine, untied, bake_base(untied))


# By default every eighth: all of them are served exactly, above.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if place % 8 == 0 else pytest.mark.full) for place, name in enumerate(FULL_WEIGHTS)],
)
def test_in_16_bits_every_kind_is_served_within_twice_the_noise_of_the_bare_base(noisy, name):
    kind = FULL_WEIGHTS[name]
    if kind.needs:
        pytest.importorskip(kind.needs, reason=f"PEFT asks for {kind.needs} here")
    model = noisy.start(kind)
    DenseSync(model, noisy.engine).push()
    mean, largest = noisy.share(model)
    print(f"{name}: mean {mean:.2f}, largest {largest:.2f} of the bare base's")
    assert mean < 2
    assert largest < 2


def test_a_4_bit_trainer_is_served_within_twice_the_noise_of_the_bare_base(untied):
    model = get_peft_model(load_base(untied), lora(use_dora=True))
    with LocalEngine(bake_base(untied), **OPTIONS) as engine:
        assert verify_base(model, engine).is_verified
        pair = Pair(engine, untied, None)
        with torch.no_grad(), model.disable_adapter():
            noise = pair.apart(model)
        randomise(model, 0.02)
        canary = Canary(model, engine)
        canary.calibrate()
        report = DenseSync(model, engine, canary).push()
        assert report.canary_difference is not None
        print(f"bare {noise:.2e}, DoRA {pair.apart(model):.2e}")
        assert pair.apart(model) < 2 * noise


def test_a_push_is_proved_weight_by_weight_and_a_failed_proof_is_not_served(exact, monkeypatch):
    exact.engine.drop_adapter()
    model = trained(exact.base, FULL_WEIGHTS["dora"])
    canary = Canary(model, exact.engine)
    canary.calibrate()
    strategy = DenseSync(model, exact.engine, canary)
    assert strategy.push().canary_difference < canary.threshold
    strategy.verify()
    true = exact.engine.load_dense
    monkeypatch.setattr(
        exact.engine,
        "load_dense",
        lambda weights, version: true(((n, w * 1.01 if "o_proj" in n else w) for n, w in weights), version),
    )
    with pytest.raises(CanaryError, match=r"2 of 27 weights .*self_attn.o_proj"):
        strategy.push()
    with pytest.raises(EngineBrokenError, match="canary"):
        exact.engine.score(SEQUENCES)
    monkeypatch.undo()
    strategy.push()
    assert exact.apart(model) < EXACT


def test_a_rollout_that_has_begun_is_sampled_to_its_end_by_the_weights_with_which_it_began(exact, monkeypatch):
    engine = exact.engine
    DenseSync(trained(exact.base, ADAPTER["plain"], seed=1), engine).push()
    asked = {"max_tokens": 26, "seed": 3, "extra": {"min_tokens": 26}}
    expected, real = engine.generate([[40, 41]], **asked), engine.llm.llm_engine.step
    monkeypatch.setattr(engine.llm.llm_engine, "step", lambda: (time.sleep(0.02), real())[1])
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(engine.generate, [[40, 41]], **asked)
        while not engine._driver._open:
            assert not old.done()
            time.sleep(0.001)
        DenseSync(trained(exact.base, FULL_WEIGHTS["dora"], seed=2), engine).push()
        found = old.result()
    assert (found.version, found.completion_ids) == (expected.version, expected.completion_ids)
    assert found.logprobs == expected.logprobs
    assert engine.generate([[40, 41]], **asked).logprobs != expected.logprobs


def test_a_push_holds_one_weight_and_one_fused_layer_and_no_more(exact, monkeypatch):
    from vllm.model_executor.model_loader.reload import meta

    true, sent, layers = meta.materialize_meta_tensor, [], []

    def noted(tensor):
        made = true(tensor)
        layers.append((made.untyped_storage().nbytes(), StorageWeakRef(made.untyped_storage())))
        return made

    def watched():
        for name, weight in iter_weights(trained(exact.base, FULL_WEIGHTS["dora"])):
            assert all(ref.expired() for ref in sent), f"another weight is held while {name} is made"
            alive = [size for size, ref in layers if not ref.expired()]
            assert len([size for size in alive if size > 4096]) <= 1, f"two layers are held while {name} is made"
            own = weight.clone()  # what is not adapted is the model's own
            sent.append(StorageWeakRef(own.untyped_storage()))
            del weight
            yield name, own
            del own

    monkeypatch.setattr(meta, "materialize_meta_tensor", noted)
    exact.engine.load_dense(watched(), exact.engine.version + 1)
    assert len(sent) == 27
    assert max(size for size, _ in layers) > 2**16


@pytest.mark.parametrize("at", [0, 1, 10, 20])
@pytest.mark.parametrize("error", [OSError("the line is dead"), KeyboardInterrupt()])
def test_a_stream_that_breaks_is_never_served_half(exact, at, error):
    old, new = trained(exact.base, ADAPTER["plain"], seed=1), trained(exact.base, FULL_WEIGHTS["dora"], seed=2)
    DenseSync(old, exact.engine).push()
    version = exact.engine.version
    with pytest.raises(SyncError if isinstance(error, Exception) else KeyboardInterrupt):
        exact.engine.load_dense(breaking(iter_weights(new), at, error), version + 1)
    if at == 0:
        assert exact.engine.version == version
        assert exact.apart(old) < EXACT
    else:
        for use in (
            lambda: exact.engine.generate([[40, 41]], max_tokens=2),
            lambda: exact.engine.score(SEQUENCES),
            lambda: exact.engine.score(SEQUENCES, bare=True),
        ):
            with pytest.raises(EngineBrokenError, match="a part"):
                use()
    DenseSync(new, exact.engine).push()
    assert exact.apart(new) < EXACT


def test_a_push_that_fails_at_once_brings_nothing_back_that_was_lost(exact):
    """Half written, withdrawn or gone with a rebuild: it is served neither before nor after a push that does not
    begin."""
    engine, model = exact.engine, trained(exact.base, FULL_WEIGHTS["dora"])
    strategy, nan = DenseSync(model, engine), copy.deepcopy(model)
    with torch.no_grad():
        next(p for n, p in nan.named_parameters() if "lora_B" in n)[0, 0] = float("nan")

    def break_in_the_middle():
        with pytest.raises(SyncError, match="Nothing is served"):
            engine.load_dense(breaking(iter_weights(model), 10, OSError("dead")), engine.version + 1)

    def rebuild():
        engine._is_broken = True
        engine.wake()

    for lose in (break_in_the_middle, lambda: engine.withdraw_dense("the proof failed"), rebuild):
        strategy.push()
        lose()
        with pytest.raises(SyncError, match="Nothing is served"):
            engine.load_dense(breaking(iter_weights(model), 0, OSError("dead")), engine.version + 1)
        with pytest.raises(AdapterRejectedError, match="NaN"):
            DenseSync(nan, engine).push()
        assert not engine.holds_dense
        with pytest.raises(EngineBrokenError):
            engine.score(SEQUENCES)
    strategy.push()
    assert exact.apart(model) < EXACT


def test_a_tensor_cut_at_a_random_place_is_never_served(exact):
    model = trained(exact.base, FULL_WEIGHTS["dora"], seed=3)
    choice = random.Random(0)
    count = len(list(iter_weights(model)))
    for _ in range(10):
        at = choice.randrange(1, count)

        def cut(at=at):
            for i, (name, weight) in enumerate(iter_weights(model)):
                yield name, weight.flatten()[: choice.randrange(weight.numel())] if i == at else weight

        with pytest.raises(SyncError):
            exact.engine.load_dense(cut(), exact.engine.version + 1)
        with pytest.raises(EngineBrokenError):
            exact.engine.score(SEQUENCES)
    DenseSync(model, exact.engine).push()
    assert exact.apart(model) < EXACT


def test_a_stream_that_lacks_a_weight_or_has_one_too_many_is_never_served(exact):
    model = trained(exact.base, FULL_WEIGHTS["dora"])
    whole = dict(iter_weights(model))
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"):
        with pytest.raises(SyncError, match=r"no value came for|shape"):
            exact.engine.load_dense(((n, w) for n, w in whole.items() if n != name), 7)
        with pytest.raises(EngineBrokenError):
            exact.engine.score(SEQUENCES)
    with pytest.raises(SyncError):
        exact.engine.load_dense([*whole.items(), ("model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2))], 7)
    with pytest.raises(EngineBrokenError):
        exact.engine.score(SEQUENCES)
    exact.engine.drop_adapter()


def test_the_base_can_be_had_back_and_a_rebuilt_engine_says_that_its_weights_are_gone(exact):
    exact.engine.drop_adapter()
    bare = exact.apart(exact.base)
    model = trained(exact.base, FULL_WEIGHTS["dora"])
    DenseSync(model, exact.engine).push()
    with pytest.raises(EngineUnsupportedError, match="replaced it"):
        exact.engine.score(SEQUENCES, bare=True)
    exact.engine.drop_adapter()
    assert exact.engine.version == 0
    assert exact.apart(exact.base) == bare
    DenseSync(model, exact.engine).push()
    exact.engine._is_broken = True  # as after a failed step
    with pytest.raises(EngineBrokenError, match="lost"):
        exact.engine.generate([[40, 41]], max_tokens=2)
    DenseSync(model, exact.engine).push()
    assert exact.apart(model) < EXACT


def test_a_prefix_of_older_weights_is_never_used_again(exact):
    prompt = [[40 + i % 20 for i in range(24)]]
    for seed in range(3):
        model = trained(exact.base, ADAPTER["plain"], seed=seed)
        DenseSync(model, exact.engine).push()
        sampled = [exact.engine.generate(prompt, temperature=0.0, max_tokens=4) for _ in range(2)]
        assert sampled[0].logprobs == sampled[1].logprobs
        ids = torch.tensor([prompt[0] + sampled[0].completion_ids[0]])
        with torch.no_grad():
            logprobs_TV = model(ids).logits[0].log_softmax(-1)
        ours_T = logprobs_TV[len(prompt[0]) - 1 : -1].gather(1, ids[0, len(prompt[0]) :, None])[:, 0]
        assert float((ours_T - torch.tensor(sampled[0].logprobs[0])).abs().max()) < EXACT


def test_a_hundred_pushes_leave_the_trainer_as_it_was(exact, untied):
    model = get_peft_model(load_base(untied), lora(use_dora=True))
    randomise(model, 0.02)
    before = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    strategy = DenseSync(model, exact.engine)
    for _ in range(100):
        strategy.push()
    now = dict((*model.named_parameters(), *model.named_buffers()))
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in before)


def test_an_engine_with_lora_drops_its_adapters_and_takes_none_until_the_base_is_back(untied, tmp_path):
    baked = bake_base(untied, "float32")
    with LocalEngine(baked, **{**OPTIONS, "max_lora_rank": 8}) as engine:
        pair = Pair(engine, baked, tmp_path)
        plain, dora = pair.adapted(lora()), trained(pair.base, FULL_WEIGHTS["dora"])
        strategy = AdapterSync(plain, engine, InPlaceTransport())
        for _ in range(2):
            strategy.push()
        assert pair.apart(plain) < EXACT
        with pytest.raises(SyncError, match="after 0 tensors"):
            engine.load_dense(breaking(iter_weights(dora), 0, OSError("dead")), 3)
        assert (engine.version, pair.apart(plain) < EXACT) == (2, True)
        assert pair.difference(plain) < EXACT
        DenseSync(dora, engine).push()
        assert pair.apart(dora) < EXACT
        with pytest.raises(EngineUnsupportedError, match="to which no adapter belongs"):
            pair.difference(plain)
        engine.drop_adapter()
        assert pair.difference(plain) < EXACT


def test_after_a_failed_proof_or_a_loss_the_next_push_is_verified_whatever_the_cadence(exact, monkeypatch):
    exact.engine.drop_adapter()
    model = trained(exact.base, FULL_WEIGHTS["dora"])
    canary = Canary(model, exact.engine, every=100)
    canary.calibrate()
    strategy, true = DenseSync(model, exact.engine, canary), exact.engine.load_dense

    def wrong(weights, version):
        return true(((n, w * 1.5 if "o_proj" in n else w) for n, w in weights), version)

    monkeypatch.setattr(exact.engine, "load_dense", wrong)
    for _ in range(2):
        with pytest.raises(CanaryError):
            strategy.push()
    monkeypatch.undo()
    assert strategy.push().canary_difference is not None
    assert strategy.push().canary_difference is None
    monkeypatch.setattr(exact.engine, "load_dense", wrong)
    exact.engine._is_broken = True
    with pytest.raises(CanaryError):  # rebuilt on the way
        strategy.push()
    exact.engine._is_broken = True
    exact.engine.wake()
    with pytest.raises(CanaryError):
        strategy.verify()
    with pytest.raises(EngineBrokenError):
        exact.engine.score(SEQUENCES)
    monkeypatch.undo()
    strategy.verify()
    assert exact.apart(model) < EXACT


@pytest.mark.parametrize("part", ["bias", "modules_to_save", "lora_magnitude", "lora_B"])
def test_nan_in_anything_that_is_trained_is_rejected_and_the_old_version_serves(exact, part):
    config = {"bias": lora(bias="all"), "modules_to_save": lora(modules_to_save=["norm"])}.get(
        part, lora(use_dora=True)
    )
    model = get_peft_model(copy.deepcopy(exact.base), config)
    strategy = DenseSync(model, exact.engine)
    strategy.push()
    version = exact.engine.version
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if part in n and p.requires_grad).view(-1)[0] = float("nan")
    with pytest.raises(AdapterRejectedError, match="NaN or infinity"):
        strategy.push()
    assert exact.engine.version == version
    exact.engine.score(SEQUENCES)


def test_a_weight_that_becomes_infinite_when_it_is_made_is_rejected_and_never_served(exact):
    model = trained(exact.base, FULL_WEIGHTS["dora"])
    strategy = DenseSync(model, exact.engine)
    strategy.push()
    layer = model.get_base_model().model.layers[1].self_attn.o_proj
    with torch.no_grad():
        layer.lora_magnitude_vector["default"].weight.fill_(3e38)  # finite itself
    with pytest.raises(AdapterRejectedError, match=r"o_proj.*NaN"):
        strategy.push()
    with pytest.raises(EngineBrokenError):
        exact.engine.score(SEQUENCES)
    with torch.no_grad():
        layer.lora_magnitude_vector["default"].weight.fill_(1.0)
    strategy.push()
    assert exact.apart(model) < EXACT
