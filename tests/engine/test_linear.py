"""The direct products inside real vLLM: mixed batches stay right, and the slots are the buffers that are multiplied."""

import pytest
import torch
from kinds import lora
from pair import OPTIONS, SEQUENCES, Pair
from peft import get_peft_model
from support import MATRIX, make_model, randomise

from qlora_rl import (
    AdapterSync,
    LocalEngine,
    bake_base,
    export_adapter,
    load_base,
    prepare_base,
)
from qlora_rl.adapter.store import write_adapter
from qlora_rl.contracts import SamplingSpec
from qlora_rl.engine.linears import base_compute, linear
from qlora_rl.engine.linears.cpu_kernel import codes_kernel
from qlora_rl.engine.linears.linear import AdapterProducts
from qlora_rl.engine.sampling import sampling_params
from qlora_rl.engine.server import serve
from qlora_rl.errors import ConfigConflictError
from qlora_rl.sync.in_place import InPlaceTransport


@pytest.fixture(scope="module")
def pair(base, tmp_path_factory):
    """Both sides on the baked float32 form of the tiny NF4 base."""
    baked = bake_base(base, "float32")
    with LocalEngine(baked, **OPTIONS | {"max_lora_rank": 16}) as engine:
        yield Pair(engine, baked, tmp_path_factory.mktemp("exact"))


def scored(engine, requests):
    """Logprobs of SEQUENCES[0] under each of these LoRARequests (None: the bare base), all in one batch."""
    llm = engine.llm.llm_engine
    spec = SamplingSpec(max_tokens=1, temperature=0.0, extra={"prompt_logprobs": 0})
    for i, request in enumerate(requests):
        prompt = {"prompt_token_ids": SEQUENCES[0], "cache_salt": f"mixed-{i}-{id(requests)}"}
        llm.add_request(f"mixed-{i}", prompt, sampling_params(spec, [i])[0], lora_request=request)
    found = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                rows = zip(SEQUENCES[0][1:], output.prompt_logprobs[1:], strict=True)
                found[output.request_id] = torch.tensor([entry[token].logprob for token, entry in rows])
    return [found[f"mixed-{i}"] for i in range(len(requests))]


def test_the_layers_multiply_through_the_direct_products(pair):
    manager = pair.engine.llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager._adapter_manager
    layers = [layer for name, layer in manager.modules.items() if "proj" in name]
    assert layers
    for layer in layers:
        assert isinstance(layer.punica_wrapper.add_lora_linear, AdapterProducts)


def test_norms_of_16_bits_go_to_the_kernel_and_others_stay_vllms(pair, base):
    from vllm.model_executor.layers.layernorm import RMSNorm

    kernel = codes_kernel()
    if isinstance(kernel, str):
        pytest.skip(kernel)
    with LocalEngine(base, **OPTIONS) as engine:
        for found, by_kernel in ((engine, True), (pair.engine, False)):
            model = found.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
            norms = [layer for layer in model.modules() if type(layer) is RMSNorm]
            assert norms
            assert all((layer._forward_method.__module__ == base_compute.__name__) is by_kernel for layer in norms)
            residuals = [torch.randn(3, norms[0].hidden_size).to(norms[0].weight.dtype) for _ in range(2)]
            x, copies = residuals[0] * 2, [residual.clone() for residual in residuals]
            ours, left = norms[0](x.clone(), residuals[0])
            theirs, expected = norms[0].forward_native(x.clone(), copies[0])
            assert torch.equal(left, expected)
            assert torch.allclose(ours.float(), theirs.float(), rtol=2**-6)


def test_requests_with_and_without_an_adapter_and_with_two_of_them_share_a_batch(pair):
    """vLLM's own CPU way takes the last slot's adapter for the bare ones."""
    model = pair.adapted(lora(r=16), seed=1)
    strategy = AdapterSync(model, pair.engine, InPlaceTransport())
    for seed in range(3):  # both slots hold a version of their own
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "lora_B" in n:
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.05)
        strategy.push()
    first, second = pair.engine._adapters._slot_requests
    bare, one, other = (scored(pair.engine, [request])[0] for request in (None, first, second))
    assert min((bare - one).abs().max(), (bare - other).abs().max(), (one - other).abs().max()) > 1e-2
    for requests, alone in (
        ([first, None, first, None], [one, bare, one, bare]),
        ([None, second], [bare, other]),
        ([first, second, None, second], [one, other, bare, other]),
    ):
        for together, single in zip(scored(pair.engine, requests), alone, strict=True):
            assert (together - single).abs().max() < 1e-5
    strategy.close()


def test_vllms_own_way_still_gives_the_last_slots_adapter_to_bare_requests(pair, tmp_path):
    """When this fails, vLLM has fixed it, and the docstring of engine/linears/linear.py must no longer say so."""
    model = pair.adapted(lora(r=16), seed=1)
    write_to = [tmp_path / "1", tmp_path / "2"]
    with LocalEngine(pair.engine.base, **OPTIONS | {"max_lora_rank": 16}, base_compute="vllm") as engine:
        requests = []
        for version, directory in enumerate(write_to, 1):
            directory.mkdir()
            write_adapter(export_adapter(model, dtype=torch.float32), directory)
            engine.load_adapter(directory, version)
            requests.append(engine._adapters.served.request)
        bare = scored(engine, [None])[0]
        assert (scored(engine, [requests[0], None])[1] - bare).abs().max() > 1e-2


LONGER = [[40 + (7 * i + 3 * j) % 50 for j in range(31)] for i in range(8)]


@pytest.mark.parametrize(("architecture", "tied", "kv_heads", "quant", "double", "blocksize", "skip"), MATRIX[:5])
def test_every_way_to_multiply_is_as_near_to_the_exact_policy_as_vllms_own(
    tmp_path, architecture, tied, kv_heads, quant, double, blocksize, skip
):
    """In bf16, against the same codes in float32; the fingerprint stays what it was."""
    source = make_model(tmp_path / "model", architecture=architecture, tied=tied, kv_heads=kv_heads)
    base = prepare_base(
        source, quant, out=tmp_path / "base", double_quant=double, blocksize=blocksize, skip_modules=skip
    )
    model = get_peft_model(load_base(bake_base(base, "float32")), lora(r=8)).eval()
    randomise(model)
    (tmp_path / "adapter").mkdir()
    write_adapter(export_adapter(model, dtype=torch.bfloat16), tmp_path / "adapter")
    with torch.no_grad():
        logprobs_BTV = model(torch.tensor(LONGER)).logits.log_softmax(-1)
    exact_BT = logprobs_BTV[:, :-1].gather(2, torch.tensor(LONGER)[:, 1:, None])[..., 0]
    far, digests = {}, set()
    with LocalEngine(base, **OPTIONS | {"max_lora_rank": 8}, base_compute="vllm") as engine:
        assert engine.base_compute.base == "vllm"
        for way in ("vllm", "nf4"):
            if way != "vllm":
                done = engine.llm.collective_rpc("qlora_multiply_directly", args=(way,))[0]
                assert (done["base"], done["adapter"], done["left"]) == (way, "direct", {})
            engine.drop_adapter()
            engine.load_adapter(tmp_path / "adapter", 1)
            far[way] = (torch.tensor(engine.score(LONGER)) - exact_BT).abs()
            digests.add(engine.describe_base().digest)
    assert len(digests) == 1
    floor = far["vllm"].mean()
    assert 0 < floor < 0.05
    # 240 logprobs; roundings fall differently, by chance
    assert far["nf4"].mean() < 1.25 * floor, far
    assert far["nf4"].max() < 2 * far["vllm"].max(), far


def test_on_a_cpu_codes_are_multiplied_and_without_a_kernel_vllms_own_way(base, monkeypatch):
    kernel = codes_kernel()
    with LocalEngine(base, **OPTIONS | {"max_lora_rank": 8}) as engine:
        found = engine.base_compute
        assert (found.base, found.adapter) == ("vllm" if isinstance(kernel, str) else "nf4", "direct")
        sampled = engine.generate([[40, 41, 42]], max_tokens=4, temperature=0.0)
    monkeypatch.setattr(base_compute, "codes_kernel", lambda: "there is no C++ compiler")
    monkeypatch.setattr(linear, "codes_kernel", lambda: "there is no C++ compiler")
    with LocalEngine(base, **OPTIONS | {"max_lora_rank": 8}) as engine:
        found = engine.base_compute
        assert (found.base, found.adapter, found.kernel) == ("vllm", "direct", "there is no C++ compiler")
        assert engine.generate([[40, 41, 42]], max_tokens=4, temperature=0.0).completion_ids == sampled.completion_ids


def test_an_unknown_way_is_rejected_before_vllm_starts(base):
    with pytest.raises(ConfigConflictError, match="base_compute='int8' is not one of"):
        serve(base, base_compute="int8")
    with pytest.raises(ConfigConflictError, match="base_compute='int8' is not one of"):
        LocalEngine(base, base_compute="int8")
