"""Two ranks of one real vLLM, each with a part of the base: verified by parts, and as exact as one.

On the CPU a rank is a process with a share of the cores. The base is 4-bit with float32 beside it: its baked form is
float32 then, where trainer and engine differ by 1e-6, so that a wrong part of anything stands out.
"""

import logging
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import make_model, randomise, score
from test_canary import double_alpha, tamper
from test_training import lines, make

from qlora_rl import (
    AdapterSync,
    BaseMismatchError,
    Canary,
    CanaryError,
    CannotShareError,
    EngineBrokenError,
    LocalEngine,
    ServerEngine,
    bake_base,
    borrow_base,
    load_base,
    prepare_base,
    start_server,
    verify_base,
)
from qlora_rl.base.fingerprint import fingerprint_stored
from qlora_rl.cpu_features import processor
from qlora_rl.errors import ConfigConflictError
from qlora_rl.sync.transports import BytesTransport, DirectoryTransport

EXACT = 1e-5
SIZES = {"max_lora_rank": 8, "max_model_length": 64, "max_num_seqs": 16}
EMBED, NORM = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"
GATE, DOWN, K = (f"model.layers.0.{name}_proj.weight" for name in ("mlp.gate", "mlp.down", "self_attn.k"))


def started(base, **options):
    """An engine of two ranks, of one thread each."""
    return LocalEngine(base, tensor_parallel_size=2, **{**SIZES, **options})


def children(of):
    """vLLM's ranks, and of a server its engine."""
    found = [child for child in psutil.Process(of).children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return {child for child in found if "resource_tracker" not in " ".join(child.cmdline())}


def ranks_of(of):
    """vLLM's ranks, in this process or in one that it has started."""
    return {child for child in children(of) if "Worker_TP" in child.name()}


def kl(model, prompts, rollout):
    """Mean of exp(d) - 1 - d over the sampled tokens, d the trainer's logprob less the engine's; never below 0."""
    d = score(model, prompts, rollout).double()
    return float((d.exp() - 1 - d).mean())  # of |d|, which is no less


@pytest.fixture(scope="module")
def exact(model_dir):
    return prepare_base(model_dir, compute_dtype="float32")


@pytest.fixture(scope="module")
def ranks(exact):
    before, shared = (dict(os.environ), torch.get_num_threads()), set(Path("/dev/shm").glob("vllm_dist_*"))
    with started(exact) as engine:
        assert not set(Path("/dev/shm").glob("vllm_dist_*")) - shared  # vLLM would leave it behind
        changed = {key for key in {*before[0], *os.environ} if before[0].get(key) != os.environ.get(key)}
        assert not changed & {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "LOCAL_WORLD_SIZE"}
        assert torch.get_num_threads() == before[1]
        yield engine


@pytest.fixture
def trainer(exact):
    torch.manual_seed(0)
    model = get_peft_model(load_base(exact), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    randomise(model)
    return model


def damage(engine, name, rank):
    """Change one number of a weight in one rank; called again, put it back.

    vLLM's CPU backend may have packed the weight away: then what its layer multiplies with is changed.
    """
    path, part = name.removesuffix(".weight"), 0
    for fused, parts in {"qkv_proj": "q_proj k_proj v_proj", "gate_up_proj": "gate_proj up_proj"}.items():
        if (own := path.rpartition(".")[2]) in parts.split():
            path, part = f"{path.rpartition('.')[0]}.{fused}", parts.split().index(own)

    def change(worker):
        if worker.rank != rank:
            return False
        modules = dict(worker.model_runner.get_model().named_modules())
        layer = modules.get(f"{path}.base_layer") or modules[path]
        row = sum(getattr(layer, "output_partition_sizes", [0])[:part])
        if layer.weight.numel():
            layer.weight.data[row : row + 1].view(-1).view(torch.uint8)[3] ^= 1
        elif hasattr(layer, "as_before"):
            layer.cpu_linear = layer.__dict__.pop("as_before")
        else:
            own = layer.as_before = layer.cpu_linear

            def other(x, weight, bias):
                y = own(x, weight, bias)
                y[..., row] += x[..., 0] * 2**-8
                return y

            layer.cpu_linear = other
        return True

    assert sum(engine.llm.collective_rpc(change)) == 1


# --- the base -------------------------------------------------------------------------------------------------------


def test_the_ranks_of_a_4_bit_base_hold_its_decoded_weights_and_prove_each_part(ranks, exact):
    proof = verify_base(load_base(exact), ranks)
    assert proof.is_verified
    baked = bake_base(exact)
    assert proof.theirs == fingerprint_stored(baked)
    assert baked.parent == exact.identity
    assert len({len(held) for held in ranks.llm.collective_rpc("qlora_describe_base")}) == 1


@pytest.mark.parametrize(
    ("name", "rank", "where"),
    [
        (GATE, 1, "rank 1 of 2 holds something else in rows 128 to 255"),
        (K, 1, "rank 1 of 2 holds something else in rows 32 to 63"),
        (DOWN, 0, "rank 0 of 2 holds something else in columns 0 to 127"),
        (NORM, 1, "rank 1 of 2 holds something else)"),
        (EMBED, 0, "rank 0 of 2 holds something else in rows 0 to"),
    ],
)
def test_a_number_that_is_wrong_in_one_rank_is_found_with_its_weight_and_the_rank(ranks, exact, name, rank, where):
    model = load_base(exact)
    damage(ranks, name, rank)
    try:
        with pytest.raises(BaseMismatchError) as caught:
            verify_base(model, ranks)
    finally:
        damage(ranks, name, rank)
    assert caught.value.module == name
    assert where in str(caught.value)
    assert len(caught.value.reasons) == 1
    assert verify_base(model, ranks).is_verified


def test_they_draw_what_the_trainer_would(ranks, exact, prompts):
    model = load_base(exact)
    for temperature in (0.7, 1.0):
        rollout = ranks.generate(prompts, temperature=temperature, max_tokens=12, seed=1)
        assert score(model, prompts, rollout, temperature).max() < EXACT
    assert kl(model, prompts, rollout) < 1e-9


def test_seeds_give_the_same_in_any_company_and_a_push_waits_for_nobody(ranks, prompts):
    together = ranks.generate(prompts, max_tokens=12, seed=3)
    assert ranks.generate(prompts[:3], max_tokens=12, seed=3).completion_ids == together.completion_ids[:3]
    assert len({tuple(ids) for ids in ranks.generate([prompts[0]] * 8, max_tokens=12, seed=3).completion_ids}) > 1


def test_what_the_ranks_compile_is_kept_apart_from_other_processors(ranks):
    """torch's cache would give a rank with AVX2 the token ids that were computed for AVX-512: an index out of range in
    every step."""

    def tag(worker):
        from torch.compiler import config

        return config.cache_key_tag

    assert all(each.endswith(processor().torch_kernels) for each in ranks.llm.collective_rpc(tag))


def test_it_says_what_it_cannot_do_in_parts(ranks):
    can = ranks.capabilities()
    assert can.takes_adapters
    assert can.holds_two
    assert not can.takes_in_place
    assert not can.takes_dense
    with pytest.raises(CannotShareError, match="not in this one"):
        borrow_base(ranks)


# --- an adapter -----------------------------------------------------------------------------------------------------


@pytest.fixture
def strategy(ranks, trainer):
    verify_base(trainer, ranks)
    canary = Canary(trainer, ranks)
    canary.calibrate()
    assert canary.threshold <= 1e-3
    strategy = AdapterSync(trainer, ranks, DirectoryTransport(), canary)
    yield strategy
    strategy.close()
    ranks.drop_adapter()


def test_an_adapter_is_served_in_parts_exactly(ranks, trainer, strategy, prompts):
    bare = ranks.generate(prompts, temperature=0.0, max_tokens=8)
    for seed in range(2):
        randomise(trainer, 0.1, seed=seed)
        report = strategy.push()
        assert report.transport == "directory"
        rollout = ranks.generate(prompts, max_tokens=12, seed=seed)
        assert rollout.version == report.version
        assert score(trainer, prompts, rollout).max() < EXACT
        assert report.canary_difference < EXACT
    assert ranks.generate(prompts, temperature=0.0, max_tokens=8).completion_ids != bare.completion_ids
    sequences = [[*prompt, 44, 45] for prompt in prompts]
    assert ranks.score(sequences, bare=True) != ranks.score(sequences)


def test_a_changed_adapter_is_noticed_and_the_old_version_serves(ranks, trainer, strategy, prompts, monkeypatch):
    strategy.push()
    before = ranks.generate(prompts, max_tokens=6, seed=1)
    randomise(trainer, 0.1, seed=4)
    with monkeypatch.context() as patch:
        tamper(patch, strategy, double_alpha)
        with pytest.raises(CanaryError, match="lora_B"):
            strategy.push()
    after = ranks.generate(prompts, max_tokens=6, seed=1)
    assert (after.version, after.logprobs) == (before.version, before.logprobs)


def test_a_part_that_one_rank_lost_is_noticed(ranks, trainer, strategy):
    strategy.push()
    adapter = ranks._adapters.served.request.lora_int_id

    def lose(worker):
        places = worker.qlora_lend_adapter(adapter, 8)
        if worker.rank == 1:
            places["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].zero_()

    ranks.llm.collective_rpc(lose)
    with pytest.raises(
        CanaryError, match=r"1 of 28 matrices .* first base_model\.model\.model\.layers\.1\.mlp\.down_proj\.lora_A"
    ):
        strategy.canary._compare_held(strategy._adapter.bundle())


# --- processes ------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_terminal_leaves_the_ranks_alone(ranks, prompts):
    before = ranks.generate(prompts, max_tokens=6, seed=1)
    found = ranks_of(os.getpid())
    assert len(found) == 2
    for child in found:  # a terminal sends it to all processes; ours answers it between two steps
        child.send_signal(signal.SIGINT)
    assert ranks.generate(prompts, max_tokens=6, seed=1).logprobs == before.logprobs
    assert all(child.is_running() for child in found)


@pytest.mark.full  # an engine of its own, started twice
def test_a_rank_that_is_killed_ends_the_call_and_the_engine_comes_back_with_its_adapter(
    exact, trainer, prompts, caplog
):
    caplog.set_level(logging.INFO, "qlora_rl")
    others = children(os.getpid())
    with started(exact) as engine:
        assert "vLLM cannot cut 4-bit weights" in caplog.text
        strategy = AdapterSync(trainer, engine, DirectoryTransport(), Canary(trainer, engine))
        strategy.canary.calibrate()
        strategy.push()
        before = engine.generate(prompts, max_tokens=6, seed=1)
        sockets = engine._llm.qlora_sockets
        struck = max(ranks_of(os.getpid()) - others, key=lambda rank: rank.pid)
        struck.kill()
        with pytest.raises(EngineBrokenError, match="vLLM failed in a step"):
            engine.generate(prompts, max_tokens=6, seed=1)
        after = engine.generate(prompts, max_tokens=6, seed=1)
        assert (after.version, after.completion_ids) == (before.version, before.completion_ids)
        # A context that is collected with an open socket is waited for, without an end.
        assert len(sockets) >= 6
        assert all(socket.closed for socket in sockets)
        assert verify_base(trainer, engine).is_verified
        strategy.close()
    assert children(os.getpid()) == others


@pytest.mark.full  # an engine for each; by default one shape
@pytest.mark.parametrize(
    ("architecture", "tied", "kv_heads"),
    [("qwen3", False, 1), ("llama-bias", False, 4), ("gemma", True, 1), ("mistral", True, 2)],
)
def test_other_shapes_are_verified_and_served_in_parts(tmp_path, architecture, tied, kv_heads, prompts):
    source = make_model(tmp_path / "model", architecture=architecture, tied=tied, kv_heads=kv_heads)
    base = prepare_base(source, compute_dtype="float32")

    model = get_peft_model(load_base(base), LoraConfig(r=8, target_modules="all-linear"))
    with started(base) as engine:
        assert verify_base(model, engine).is_verified
        canary = Canary(model, engine)
        canary.calibrate()
        strategy = AdapterSync(model, engine, DirectoryTransport(), canary)
        randomise(model)
        strategy.push()
        rollout = engine.generate(prompts, max_tokens=12, seed=1)
        assert score(model, prompts, rollout).max() < EXACT
        strategy.close()


@pytest.mark.full  # by default against the trainer's model: test_they_draw_what_the_trainer_would
def test_two_ranks_draw_what_one_engine_draws(exact, ranks, prompts):
    whole = ranks.generate(prompts, max_tokens=12, seed=5)
    with LocalEngine(bake_base(exact), **SIZES) as one:
        alone = one.generate(prompts, max_tokens=12, seed=5)
    assert alone.completion_ids == whole.completion_ids


@pytest.mark.full  # two engines for each; by default float32, which shows more
@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_16_bits_are_as_close_in_parts_as_they_are_in_one(model_dir, quant, prompts):
    base = prepare_base(model_dir, quant)
    model = load_base(base)
    prompts = prompts * 4
    with started(base) as engine:
        assert verify_base(model, engine).is_verified
        two = kl(model, prompts, engine.generate(prompts, max_tokens=24, seed=1))
    with LocalEngine(bake_base(base) if quant == "nf4" else base, **SIZES) as engine:
        one = kl(model, prompts, engine.generate(prompts, max_tokens=24, seed=1))
    print(f"mismatch KL of {quant}: two ranks {two:.2e}, one {one:.2e}")
    assert two < 1e-4


@pytest.mark.full  # an engine of its own; by default pushes without a trainer
def test_a_training_on_two_ranks(base, tmp_path):
    others = children(os.getpid())
    with make(base, tmp_path, max_steps=4, vllm_tensor_parallel_size=2) as trainer:
        trainer.train()
        assert trainer.base_check.is_verified
    metrics, pushes = lines(tmp_path), lines(tmp_path, "sync.jsonl")
    assert [push["version"] for push in pushes] == [1, 2, 3, 4]
    assert {push["transport"] for push in pushes} == {"directory"}
    assert max(m["mismatch_kl"] for m in metrics) < 5e-3
    assert children(os.getpid()) == others


# --- a server -------------------------------------------------------------------------------------------------------


@pytest.mark.full  # by default in this process, above
def test_a_server_of_two_ranks_is_verified_pushed_to_and_ends_whole(exact, trainer, prompts):
    with start_server(exact, tensor_parallel_size=2, timeout_s=300, **SIZES) as server:
        running = children(server.process.pid)
        with ServerEngine(server.url, api_key=server.key, wait_s=1.0) as remote:
            assert verify_base(trainer, remote).is_verified
            canary = Canary(trainer, remote)
            canary.calibrate()
            strategy = AdapterSync(trainer, remote, BytesTransport(), canary)
            for seed in range(2):
                randomise(trainer, 0.1, seed=seed)
                strategy.push()
                rollout = remote.generate(prompts, max_tokens=12, seed=seed)
                assert score(trainer, prompts, rollout).max() < EXACT
    psutil.wait_procs(running, timeout=60)
    assert not any(process.is_running() for process in running)


def test_a_server_of_two_ranks_without_lora_could_be_given_nothing(exact):
    from qlora_rl.engine.server import serve

    with pytest.raises(ConfigConflictError, match="max_lora_rank=0 with tensor_parallel_size=2"):
        serve(exact, max_lora_rank=0, tensor_parallel_size=2)
