"""The memory estimate: against tensors that are really there, and as a table of decisions."""

import itertools
import json
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import ARCHITECTURES, MIXTURES, make_model, program
from transformers import AutoConfig, Gemma3TextConfig, Trainer, TrainingArguments
from trl.trainer.utils import add_fused_lm_head
from vision import SERVED, make_vision_config, make_vision_model

from qlora_rl import ConfigConflictError, MemoryBudgetError, QuantSpec, load_base, plan_memory, prepare_base
from qlora_rl.adapter.inspected import shorten_lora
from qlora_rl.base.attention.attend import without_masks
from qlora_rl.base.experts import ATTENTION
from qlora_rl.base.model_classes import vision_parts
from qlora_rl.cli import main
from qlora_rl.cpu_features import processor
from qlora_rl.memory import lines as count
from qlora_rl.memory import shape as shapes
from qlora_rl.memory import step
from qlora_rl.memory.cards import CARDS, RESERVE_GIB, ROOM, card_size, usable_gib
from qlora_rl.memory.plan import WAYS, MemoryRequest, largest_length
from qlora_rl.memory.published import models, published
from qlora_rl.memory.shape import Cache, read_config, read_shape, skeleton
from qlora_rl.train.scoring.padding import remove_padding, row_inputs

Live = program("benchmarks/live_memory.py").Live

GIB = 2**30
SPECS = {
    "nf4-dq": {},
    "nf4": {"double_quant": False},
    "fp4-dq-128": {"quant": "fp4", "blocksize": 128},
    "skip": {"skip_modules": ["down_proj"]},
    "bf16": {"quant": "none"},
    "float32": {"quant": "none", "compute_dtype": "float32"},
}


def make_config(architecture, **fields):
    """A small one."""
    tiny = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return AutoConfig.for_model(architecture, **tiny | fields)


def known(name):
    """Public shapes, and the public totals of their parameters."""
    import transformers

    shapes = {
        "Qwen2.5-0.5B": (
            transformers.Qwen2Config(
                vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                num_attention_heads=14,
                num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32_768,
            ),
            494_032_768,
        ),
        "Qwen3-8B": (
            transformers.Qwen3Config(
                vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
                max_position_embeddings=40_960,
            ),
            8_190_735_360,
        ),
        "Llama-3.1-8B": (
            transformers.LlamaConfig(
                vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
                max_position_embeddings=131_072,
            ),
            8_030_261_248,
        ),
        "Qwen3-30B-A3B": (
            transformers.Qwen3MoeConfig(
                vocab_size=151_936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
                num_experts_per_tok=8, tie_word_embeddings=False, max_position_embeddings=40_960,
            ),
            30_532_122_624,
        ),
    }  # fmt: skip
    return shapes[name]


@pytest.mark.parametrize(
    "row", {id(m.config): m for m in models().values() if m.is_chat}.values(), ids=lambda m: m.name
)
def test_a_shipped_shape_has_as_many_parameters_as_the_hub_counts(row):
    shape = read_shape(AutoConfig.for_model(**row.config))
    assert shape.parameters == row.parameters
    assert len(shape.caches) == shape.layers == row.config.get("text_config", row.config)["num_hidden_layers"]


def test_a_shipped_shape_is_what_the_models_own_config_says():
    for name in ("Qwen2.5-0.5B", "Qwen3-8B", "Llama-3.1-8B"):
        config, parameters = known(name)
        row = next(each for key, each in models().items() if key.endswith("/" + name.lower()))
        assert (row.parameters, read_shape(AutoConfig.for_model(**row.config)).caches) == (
            parameters,
            read_shape(config).caches,
        )
    # Gemma: every second layer, and five of six, see a window only
    assert [
        sum(c.window is None for c in read_shape(AutoConfig.for_model(**published(n).config)).caches)
        for n in ("google/gemma-2-9b-it", "google/gemma-3-1b-it")
    ] == [21, 4]
    assert published("qwen/qwen3-8b-base").config["max_position_embeddings"] == 32_768
    assert published("Qwen/Qwen3-8B").config["max_position_embeddings"] == 40_960
    assert len(models()) > 30
    assert published("a/b") is None


def storages(model):
    """Bytes of all tensors that a model holds, quantisation states included; shared storages once."""
    seen, tensors = {}, []
    for tensor in [*model.parameters(), *model.buffers()]:
        tensors.append(tensor)
        state = getattr(tensor, "quant_state", None)
        while state is not None:
            tensors += [v for v in vars(state).values() if isinstance(v, torch.Tensor)]
            state = getattr(state, "state2", None)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


# --- against what is there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "spec"),
    [
        *(("qwen3", spec) for spec in SPECS),
        ("llama-bias", "nf4-dq"),
        ("gemma", "nf4-dq"),
        *(
            pytest.param(architecture, spec, marks=pytest.mark.full)
            for architecture in ("llama-bias", "gemma")
            for spec in list(SPECS)[1:]
        ),
    ],
)
def test_the_base_takes_exactly_what_the_estimate_says(tmp_path, architecture, spec):
    source = make_model(tmp_path / "model", architecture=architecture, tied=architecture != "llama-bias")
    base = prepare_base(source, out=tmp_path / "base", **SPECS[spec])
    shape = read_shape(read_config(base.path))
    assert count.trainer_base(shape, base.spec) == storages(load_base(base))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES])
def test_a_base_of_every_architecture_is_counted_exactly(tmp_path, architecture):
    base = prepare_base(make_model(tmp_path / "model", architecture=architecture), out=tmp_path / "base")
    assert count.trainer_base(read_shape(read_config(base.path)), base.spec) == storages(load_base(base))


@pytest.mark.parametrize(
    ("architecture", "spec"),
    [
        pytest.param(architecture, spec, marks=() if spec in often else pytest.mark.full)
        for architecture, often in zip(SERVED, ({*SPECS, "tower"}, *[{"nf4-dq", "tower"}] * 3), strict=True)
        for spec in (*SPECS, "tower")
    ],
)
def test_a_base_with_a_vision_tower_is_counted_exactly(tmp_path, architecture, spec):
    pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
    how = SPECS.get(spec, {"quantize_tower": True})
    base = prepare_base(make_vision_model(tmp_path / "model", architecture), out=tmp_path / "base", **how)
    shape = read_shape(read_config(base.path))
    model = load_base(base)
    assert count.trainer_base(shape, base.spec) == storages(model)
    parts = [model.get_submodule(name) for name in vision_parts(model)]
    if spec != "tower":  # codes are two to a byte
        assert shape.tower.parameters == sum(p.numel() for part in parts for p in part.parameters())
    assert {name.split(".")[1] for name in shape.linears} == {"language_model"}


@pytest.mark.parametrize(("batch", "tokens"), [(1, 256), (4, 64)])
@pytest.mark.parametrize("architecture", SERVED)
def test_a_pass_through_the_vision_tower_is_within_5_percent_of_the_estimate(architecture, batch, tokens):
    config, side = make_vision_config(architecture, depth=3, width=256), 2 * int(tokens**0.5)
    if architecture == "gemma3":
        config.vision_config.image_size, config.mm_tokens_per_image = 14 * side, tokens
    shape, model = read_shape(config), skeleton(config).model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(1)  # of positions too
    pixels, of_shape = torch.zeros(batch * tokens * shape.tower.patches, shape.tower.patch), {}
    if architecture == "gemma3":
        pixels = pixels.reshape(batch, 3, 14 * side, 14 * side)
    else:
        of_shape["image_grid_thw"] = torch.tensor([[1, side, side]] * batch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Live() as live:
        model.get_image_features(pixels, **of_shape)
    lines = {
        line.name: line.nbytes
        for line in count.tower_lines(shape, QuantSpec(), batch=batch, sequences=batch, image_tokens=tokens)
    }
    assert lines["pixels"] == pixels.nbytes
    assert lines["vision tower, one pass"] == pytest.approx(live.peak, rel=0.05)


def test_the_estimate_of_a_model_for_images_has_its_tower_pixels_and_masks():
    config = AutoConfig.for_model(**published("Qwen/Qwen2.5-VL-7B-Instruct").config)
    memory = plan_memory(config, image_tokens=512)
    lines = {line.name: line for line in memory.lines}
    assert lines["pixels"].nbytes == 8 * 512 * 4 * 1176 * 4
    assert lines["base, shared"].nbytes > 2 * read_shape(config).tower.parameters
    assert "attention masks" in lines
    assert "image tokens in its vision tower" in lines["rollout"].why
    assert all(".language_model." in name for name in memory.adapter)
    wider = plan_memory(config, image_tokens=1024)
    assert wider.peak_bytes > memory.peak_bytes
    assert plan_memory(config).peak_bytes == wider.peak_bytes  # what is assumed
    on_cpu = {line.name for line in plan_memory(config, device="cpu").lines}
    assert "base, trainer's vision tower" in on_cpu
    text = {line.name for line in plan_memory(known("Qwen3-8B")[0]).lines}
    assert not text & {"pixels", "vision tower, one pass"}


@pytest.mark.parametrize("architecture", sorted(set(MIXTURES) - {"qwen3_moe-dense"}))
def test_a_base_with_experts_in_4_bits_is_counted_exactly(tmp_path, architecture):
    source = make_model(tmp_path / "model", architecture=architecture, tied=False)
    base = prepare_base(source, out=tmp_path / "base", quantize_experts=True)
    assert count.trainer_base(read_shape(read_config(base.path)), base.spec) == storages(load_base(base))


def test_a_card_of_24_gb_holds_30_b_parameters_of_experts_in_4_bits():
    config = known("Qwen3-30B-A3B")[0]
    wide = plan_memory(config)
    packed = plan_memory(config, spec=QuantSpec(quantize_experts=True), target_modules=ATTENTION)
    assert wide.peak_bytes > 115 * 2**30
    lines = {line.name: line.nbytes / 2**30 for line in packed.lines}
    assert 16.5 < lines["base, shared"] < 17
    assert lines["base, trainer's routers"] < 0.03
    assert packed.peak_bytes < wide.peak_bytes / 4


def test_adapters_on_experts_are_counted_exactly(mixture_in_4_bits):
    """Of the engine two slots of the largest rank for each matrix, once an adapter has reached experts."""
    for targets in ("all-linear", ["q_proj", "experts.3.down_proj"], ["q_proj"]):
        config = LoraConfig(r=8, target_modules=targets)
        estimate = plan_memory(read_config(mixture_in_4_bits.path), lora=config, spec=mixture_in_4_bits.spec)
        trained = get_peft_model(load_base(mixture_in_4_bits), config)
        assert dict(estimate.adapter) == {n: tuple(p.shape) for n, p in trained.named_parameters() if p.requires_grad}
        slots = next(line.nbytes for line in estimate.lines if line.name == "adapter, engine")
        linears = [
            *estimate.shape.linears.values(),
            *(estimate.shape.expert_matrices() if targets != ["q_proj"] else ()),
        ]
        assert slots == 2 * 8 * sum(map(sum, linears)) * 2


@pytest.fixture(scope="module")
def mixture_in_4_bits(tmp_path_factory):
    work = tmp_path_factory.mktemp("mixture")
    return prepare_base(make_model(work / "model", architecture="qwen3_moe"), out=work / "base", quantize_experts=True)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], r".*\.1\..*v_proj", None])
def test_the_adapter_takes_exactly_what_the_estimate_says(base, targets):
    config = LoraConfig(r=8, target_modules=targets, rank_pattern={"q_proj": 4}, exclude_modules=["o_proj"])
    model = get_peft_model(load_base(base), config)
    estimate = plan_memory(read_config(base.path), lora=config)
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert dict(estimate.adapter) == trained
    held = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count.adapter_bytes(estimate.adapter, 4) == 4 * held


@pytest.mark.parametrize(
    "optim",
    ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adamw_8bit", "lion_32bit", "lion_8bit",
     "ademamix", "ademamix_8bit", "paged_adamw_32bit", "rmsprop_bnb_8bit"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_keeps_exactly_what_the_estimate_says(tmp_path, optim, dtype):
    # Both sides of the size from which bitsandbytes keeps 8 bits.
    shapes = {"a.lora_A.default.weight": (16, 300), "a.lora_B.default.weight": (64, 16)}
    kind = getattr(torch, dtype)
    parameters = [torch.nn.Parameter(torch.randn(s).to(kind)) for s in shapes.values()]
    args = TrainingArguments(output_dir=str(tmp_path), optim=optim, use_cpu=not torch.cuda.is_available())
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer = optimizer_class(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    held = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    assert count.optimizer_bytes(shapes, kind.itemsize, optim) == sum(held.values())


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        *itertools.product(["qwen2", "qwen3", "llama", "mistral"], ["all-linear", ["q_proj", "down_proj"]]),
        *itertools.product(["qwen3_moe", "mixtral", "olmoe"], [list(ATTENTION)]),
    ],
)
@pytest.mark.parametrize("padded", [True, False])
def test_a_layer_keeps_what_the_estimate_says(tmp_path, architecture, targets, padded):
    """Within 2 % of a tiny model: the estimate leaves out a few float32 numbers for each token (one for a norm, one for
    a head)."""
    source = make_model(tmp_path / "model", architecture=architecture)
    base = prepare_base(source, out=tmp_path / "base")
    model = get_peft_model(load_base(base), LoraConfig(r=8, target_modules=targets)).train()
    shorten_lora(model)
    shape = read_shape(read_config(base.path))
    batch, length = 2, 47  # a number of tokens that divides no weight
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.shape[-2:] != (length, length):  # masks are a line of their own
            kept[storage.data_ptr()] = (storage.nbytes(), tensor.numel(), tensor)
        return tensor

    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :5] = 0
    ids = torch.randint(3, 60, (batch, length))
    inputs = {"input_ids": ids, "attention_mask": mask}
    if not padded:
        add_fused_lm_head(model.get_base_model())
        assert remove_padding(model.get_base_model()) == ""
        inputs = row_inputs(ids.reshape(1, -1), (length, length))
    with (
        without_masks() if not padded else nullcontext(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        out = model.get_base_model().model(**inputs, use_cache=False).last_hidden_state
    assert out.requires_grad
    # Without padding attention keeps the output of each sequence.
    whole = batch * length if padded else length
    measured = sum(size for size, numel, _ in kept.values() if numel % whole == 0) / (batch * length)
    adapter = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    layer = step.layer_activations(shape, base.spec, adapter, "cpu", padded=padded)
    last = 4 * shape.hidden  # the last norm in float32
    if not padded:
        last += 2 * 2 * shape.rotary  # every token has its own angles; in a padded batch all sequences have the same
    assert measured == pytest.approx(shape.layers * layer + last, rel=0.02)


# --- the arithmetic -------------------------------------------------------------------------------------------------


def test_the_kv_cache_of_qwen3_8b_takes_144_kib_a_token():
    shape = read_shape(known("Qwen3-8B")[0])
    assert 2 * shape.cache_elements(1) == 144 * 1024
    estimate = plan_memory(known("Qwen3-8B")[0], max_length=4096, sequences=8)
    assert estimate.cache_bytes == 144 * 1024 * (8 * 4096 + 16)
    assert (estimate.cache_sequences, estimate.cache_tokens) == (8, 8 * 4096)


def test_sliding_windows_and_layers_without_a_cache_are_counted_as_such():
    config = Gemma3TextConfig(
        num_hidden_layers=6,
        sliding_window=512,
        hidden_size=256,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    shape = read_shape(config)
    assert [c.window for c in shape.caches] == [512] * 5 + [None]
    assert shape.caches[0].elements == 2 * 2 * 64
    assert shape.cache_elements(4096) == 256 * (5 * 512 + 4096)
    assert Cache(10).window is None


def test_masks_are_planned_where_padding_stays():
    def masks(config, **request):
        return {line.name for line in plan_memory(config, **request).lines if "mask" in line.name}

    both = {"attention masks", "attention mask of a layer"}
    plain = known("Qwen2.5-0.5B")[0]
    assert masks(plain) == set()
    assert masks(plain, padded=True) == both
    assert any(s.advice == "remove_padding=True" for s in plan_memory(plain, padded=True, max_length=8192).savings())
    assert masks(make_config("mistral", sliding_window=512), max_length=512) == set()
    assert masks(make_config("mistral", sliding_window=512), max_length=513) == both


def test_what_cannot_be_at_once_is_not_added():
    """The head's tile and a layer's work take turns, and so do step and rollout."""
    estimate = plan_memory(known("Qwen2.5-0.5B")[0], max_length=1024)
    parts = {when: sum(x.nbytes for x in estimate.lines if x.when == when) for when in count.WHEN}
    step = parts["step"] + max(parts["layer"], parts["head"])
    assert estimate.peak_bytes == parts["always"] + estimate.cache_bytes + max(step, parts["rollout"])
    asleep = plan_memory(known("Qwen2.5-0.5B")[0], max_length=1024, sleeps=True)
    assert asleep.chosen == ()
    assert asleep.peak_bytes == parts["always"] + max(step, parts["rollout"] + estimate.cache_bytes)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"shared": False}, {"base, trainer", "base, engine"}),
        (
            {"gradient_checkpointing": False},
            {"activations", "one layer's work", "adapter, autocast"},
        ),
        ({"optimizer": "adamw_8bit"}, {"optimizer"}),
        ({"adapter_dtype": "bfloat16"}, {"adapter", "gradients", "optimizer", "adapter, autocast"}),
        (
            {"rank": 32},
            {"adapter", "adapter, engine", "adapter, autocast", "gradients", "optimizer", "one layer's work"},
        ),
        (
            {"batch_size": 4},
            {"activations", "one layer's work", "logits"},
        ),
        ({"offload": True}, {"activations", "layer inputs"}),
        ({"padded": True}, {"attention masks", "attention mask of a layer", "one layer's work"}),
        ({"tiles": False}, {"activations", "one layer's work", "adapter, autocast"}),
        ({"spec": QuantSpec("none")}, {"base, shared", "one dequantised weight", "rollout"}),
    ],
)
def test_a_setting_changes_its_own_lines_and_no_others(change, lines):
    config = known("Qwen2.5-0.5B")[0]
    before = {line.name: line.nbytes for line in plan_memory(config).lines}
    after = {line.name: line.nbytes for line in plan_memory(config, **change).lines}
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed - {"base, shared"} == lines - {"base, shared"}


def test_two_bases_take_more_than_one():
    config = known("Qwen3-8B")[0]
    one, two = plan_memory(config), plan_memory(config, shared=False)
    trainer = next(line for line in two.lines if line.name == "base, trainer")
    # What is saved is the trainer's base but for its few buffers.
    assert 0.99 < (two.peak_bytes - one.peak_bytes) / trainer.nbytes < 1


def test_of_what_lies_in_parts_a_gpu_holds_its_own():
    config = known("Qwen3-8B")[0]
    whole = plan_memory(config, shared=False, baked=True)
    parted = plan_memory(config, shared=False, baked=True, trainer_parts=4, engine_parts=2)
    before, after = ({line.name: line.nbytes for line in estimate.lines} for estimate in (whole, parted))
    layer = after.pop("base, a gathered layer")
    assert layer == pytest.approx(before["base, trainer"] / 36, abs=1)
    assert after.pop("base, gathered head") == 151_936 * 4096 * 2
    assert after["base, trainer"] == pytest.approx(before["base, trainer"] / 4, abs=1)
    assert after["base, engine"] == pytest.approx(before["base, engine"] / 2, abs=1)
    assert {name for name in before if before[name] != after[name]} == {"base, trainer", "base, engine"}
    assert parted.cache_bytes == pytest.approx(whole.cache_bytes / 2, abs=1)
    assert "1/4 of " in str(parted)
    # Eight heads of keys and values: more GPUs than those hold some of them twice.
    estimates = [plan_memory(config, shared=False, baked=True, engine_parts=parts) for parts in (8, 16)]
    assert estimates[0].cache_bytes == estimates[1].cache_bytes == pytest.approx(whole.cache_bytes / 8, abs=1)


def test_what_lies_in_parts_is_not_shared():
    with pytest.raises(ConfigConflictError, match="2 parts"):
        plan_memory(known("Qwen2.5-0.5B")[0], engine_parts=2)


@pytest.mark.parametrize("change", [{"shared": False}, {"sleeps": True}, {"max_length": 8192, "gpu_memory_gib": 12.0}])
def test_a_changed_estimate_is_the_one_that_would_have_been_planned(change):
    config = known("Qwen3-8B")[0]
    found = plan_memory(config, gpu_memory_gib=24.0).changed(**change)
    assert found.as_dict() == plan_memory(config, **{"gpu_memory_gib": 24.0} | change).as_dict()


# --- the verdict ----------------------------------------------------------------------------------------------------


# GiB that PyTorch's out-of-memory messages quote as "a total capacity of", for cards sold as so many GB.
REPORTED = [
    (16, 14.56), (24, 21.95), (24, 22.38), (24, 23.64), (32, 31.36), (40, 39.38), (48, 44.40), (80, 79.14), (141,
        139.72),
]  # fmt: skip


@pytest.mark.parametrize(("size", "reported"), REPORTED)
def test_what_is_planned_for_the_size_of_a_card_leaves_a_reserve_on_every_such_card(size, reported):
    estimate = plan_memory(known("Qwen3-8B")[0], batch_size=1, sequences=8 * size, max_length=4096, gpu_memory_gib=size)
    assert estimate.budget_bytes - estimate.peak_bytes == int(
        ROOM * estimate.budget_bytes
    )  # the KV cache takes the rest
    assert estimate.peak_bytes <= (reported - RESERVE_GIB) * GIB
    assert estimate.peak_bytes > 0.8 * size * GIB
    assert f"of a card of {size} GB" in estimate.table()
    assert estimate.as_dict()["budget_bytes"] == estimate.budget_bytes


def test_other_numbers_are_gib_as_they_stand_and_so_is_memory_that_is_no_cards():
    assert plan_memory(known("Qwen3-8B")[0], gpu_memory_gib=22.5).budget_bytes == int(22.5 * GIB)
    assert plan_memory(known("Qwen3-8B")[0], gpu_memory_gib=24, device="cpu").budget_bytes == 24 * GIB
    assert all(usable_gib(usable_gib(size)) == usable_gib(size) < size for size in CARDS)


@pytest.mark.parametrize("said", [24, 24.0, "24", "24GB", "24GiB", "24 gb", "24G", "24.0"])
def test_the_size_of_a_card_is_read_with_and_without_its_unit(said):
    assert card_size(said) == 24
    assert usable_gib(card_size(said)) == usable_gib(24)


@pytest.mark.parametrize("wrong", ["", "GB", "24TB", "-1", "0GB", "nan", 0, -1, float("nan"), True, None, [24]])
def test_what_is_no_size_is_said(wrong):
    with pytest.raises(ValueError, match="is not a size such as 24"):
        card_size(wrong)


def test_what_cannot_fit_is_rejected_with_the_numbers_and_what_to_lower():
    estimate = plan_memory(
        known("Qwen3-8B")[0], max_length=4096, gpu_memory_gib=16, gradient_checkpointing=False, shared=False
    )
    assert not estimate.fits
    with pytest.raises(MemoryBudgetError) as caught:
        estimate.raise_if_too_big()
    text = str(caught.value)
    assert "> gpu_memory=14.00 GiB of a card of 16 GB" in text
    assert "base, trainer" in text
    for knob in ("per_device_train_batch_size=4", "gradient_checkpointing=True", "max_length=2048", "one base for",
                 "optim='adamw_8bit'", "rank 8"):  # fmt: skip
        assert knob in text, knob
    saved = [saving.nbytes for saving in estimate.savings()]
    assert saved == sorted(saved, reverse=True)
    assert isinstance(caught.value, ValueError)


def test_a_saving_is_what_the_change_really_saves():
    asked = {"gpu_memory_gib": 16, "sleeps": True, "offload": True}
    estimate = plan_memory(known("Qwen3-8B")[0], max_length=4096, **asked)
    found = {s.advice.split(" (")[0]: s for s in estimate.savings()}
    smaller = plan_memory(known("Qwen3-8B")[0], max_length=4096, **asked, batch_size=4)
    saving = found["per_device_train_batch_size=4"]
    assert saving.nbytes == estimate.least_bytes - smaller.least_bytes
    assert saving.is_enough == smaller.fits
    lower = plan_memory(known("Qwen3-8B")[0], max_length=4096, **asked, rank=8)
    assert found["rank 8"].nbytes == estimate.least_bytes - lower.least_bytes


def test_a_model_and_an_adapter_are_made_for_the_first_plan_alone(monkeypatch):
    made = []
    monkeypatch.setattr(shapes, "skeleton", lambda config: made.append(config) or skeleton(config))
    monkeypatch.setattr(shapes, "_KNOWN", {})
    config = known("Qwen3-8B")[0]
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    first = plan_memory(config, max_length=1024)
    assert plan_memory(config, max_length=1024).as_dict() == first.as_dict()
    assert plan_memory(config, max_length=2048).peak_bytes > first.peak_bytes
    assert len(made) == 1
    others = [
        {"rank": 8},
        {"target_modules": ["q_proj"]},
        {"lora": LoraConfig(r=4, target_modules=["v_proj"])},
        {"spec": QuantSpec("none")},
    ]
    peaks = [plan_memory(config, max_length=1024, **other).peak_bytes for other in others]
    assert len(made) == 5
    config.vocab_size *= 2
    assert plan_memory(config, max_length=1024).peak_bytes > first.peak_bytes
    assert len({first.peak_bytes, *peaks}) == 5
    for layers in range(3, 20):
        config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
        plan_memory(config, max_length=1024)
    assert len(shapes._KNOWN) == 16


def long_qwen3(**request):
    """The memory estimate of Qwen3-8B for longer sequences than its config allows, one in a micro-batch."""
    config = known("Qwen3-8B")[0]
    config.max_position_embeddings = 2**19
    return plan_memory(config, batch_size=1, **request)


@pytest.mark.parametrize(
    ("length", "card", "chosen", "fits"),
    [
        (4096, 24, [], True),
        (30_720, 24, ["sleeps"], True),
        (45_056, 24, ["offload"], True),
        (80_064, 24, ["sleeps", "offload"], True),
        (400_000, 80, ["sleeps", "offload"], True),
        (250_048, 24, ["sleeps", "offload"], False),
        (250_048, None, [], True),
    ],
)
def test_the_plan_turns_on_the_cheapest_that_lets_a_run_fit(length, card, chosen, fits):
    estimate = long_qwen3(max_length=length, gpu_memory_gib=card)
    assert [way.field for way in estimate.chosen] == chosen
    assert (estimate.request.sleeps, estimate.request.offload, estimate.fits) == (
        "sleeps" in chosen,
        "offload" in chosen,
        fits,
    )
    said = estimate.as_dict()
    assert said["chosen"] == {way.field: way.setting for way in estimate.chosen}
    if chosen:
        unaided = long_qwen3(max_length=length, gpu_memory_gib=card, sleeps=False, offload=False)
        assert not unaided.fits
        assert f"without this: {unaided.least_bytes / GIB:.2f} GiB > {estimate.budget_bytes / GIB:.2f} GiB" in str(
            estimate
        )
        assert all(way.setting in estimate.choice for way in estimate.chosen)
        for other in WAYS:  # no other one, and nothing that costs less, is enough
            cheaper = sum(way.cost for way in estimate.chosen) > other.cost
            assert not (
                cheaper
                and long_qwen3(
                    max_length=length, gpu_memory_gib=card, **{"sleeps": False, "offload": False} | {other.field: True}
                ).fits
            )


def test_what_is_said_is_not_changed_by_the_plan_and_what_is_not_enough_is_said():
    asked = {"max_length": 60_032, "gpu_memory_gib": 24}
    awake = long_qwen3(**asked, sleeps=False)
    assert (awake.request.sleeps, awake.request.offload, awake.fits) == (False, True, False)
    with pytest.raises(MemoryBudgetError, match="layer inputs") as caught:
        awake.raise_if_too_big()
    assert "vllm_enable_sleep_mode=True: saves" in str(caught.value)
    both = long_qwen3(**asked, sleeps=True, offload=True)
    assert (both.fits, both.chosen, both.choice) == (True, (), "")
    assert long_qwen3(**asked, gradient_checkpointing=False).request.offload is False
    assert long_qwen3(**asked, has_engine=False).request.sleeps is False
    assert long_qwen3(**asked, device="cpu").chosen == ()


def test_the_longest_length_counts_what_the_plan_may_turn_on():
    """By plan, not on a card: a completion at a time on 80 GB and on 24 GB, and eight at a time."""
    by_plan = {card: largest_length(long_qwen3(gpu_memory_gib=card)) for card in (24, 80)}
    assert by_plan[24] >= 60_000
    assert by_plan[80] >= 250_000
    assert largest_length(long_qwen3(gpu_memory_gib=80).changed(batch_size=8)) >= 30_000
    assert largest_length(long_qwen3(gpu_memory_gib=80, sleeps=False, offload=False)) < by_plan[80] / 2


def test_the_largest_length_fits_and_the_next_one_does_not():
    estimate = plan_memory(known("Qwen3-8B")[0], gpu_memory_gib=16, batch_size=1)
    longest = largest_length(estimate)
    assert plan_memory(known("Qwen3-8B")[0], gpu_memory_gib=16, batch_size=1, max_length=longest).fits
    assert not plan_memory(known("Qwen3-8B")[0], gpu_memory_gib=16, batch_size=1, max_length=longest + 64).fits
    assert largest_length(plan_memory(known("Qwen3-8B")[0], gpu_memory_gib=4)) == 0


def test_a_kv_cache_that_holds_no_whole_sequence_is_rejected():
    estimate = plan_memory(known("Qwen3-8B")[0], max_length=4096, kv_cache_gib=0.25)
    with pytest.raises(MemoryBudgetError, match=r"kv_cache_gib=0.25 < 0.56"):
        estimate.raise_if_too_big()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_length": 0}, "max_length=0"),
        ({"gpu_memory_gib": -1.0}, "gpu_memory_gib=-1.0"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"target_modules": ["nothing_like_it"]}, "nothing_like_it"),
    ],
)
def test_a_number_that_makes_no_sense_is_named(wrong, words):
    with pytest.raises(ConfigConflictError, match=words):
        plan_memory(known("Qwen2.5-0.5B")[0], **wrong)


def test_an_optimizer_that_is_not_known_is_counted_like_adamw_and_says_so():
    line = next(x for x in plan_memory(known("Qwen2.5-0.5B")[0], optimizer="grokadamw").lines if x.name == "optimizer")
    assert not line.is_exact
    assert "is not known here" in line.why
    assert MemoryRequest(optimizer="grokadamw").as_dict()["optimizer"] == "grokadamw"


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def config_json(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(known("Qwen3-8B")[0].to_json_string())
    return str(file)


def test_plan_prints_the_estimate_and_ends_with_0_when_it_fits(config_json, capsys):
    arguments = ["plan", config_json, "--gpu-memory", "24", "--max-length", "4096", "--batch-size", "1"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for words in ("fits: ", "base, shared", "KV cache", "8.19e9 parameters as nf4-dq-64", "longest --max-length"):
        assert words in out, words


def test_plan_says_what_it_has_turned_on_and_obeys(config_json, capsys, monkeypatch):
    monkeypatch.setattr("qlora_rl.engine.compat.vllm_version", lambda: "0.31.0")
    arguments = ["plan", config_json, "--gpu-memory", "24", "--max-length", "36000", "--batch-size", "1"]
    assert main(arguments) == 0
    assert "turned on to save memory: layer inputs wait in host memory" in capsys.readouterr().out
    assert main([*arguments, "--no-offload", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] == {"sleeps": "vllm_enable_sleep_mode=True"}
    assert main([*arguments, "--offload", "--sleep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == {}
    monkeypatch.setattr("qlora_rl.engine.compat.vllm_version", lambda: "0.26.0")  # which keeps a lent base awake
    assert main([*arguments, "--no-offload"]) == 3
    assert "vllm_enable_sleep_mode" not in capsys.readouterr().out


def test_plan_says_that_it_takes_the_model_and_not_the_file_of_a_run(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('method = "grpo"')
    assert main(["plan", str(tmp_path / "run.toml")]) == 1
    assert "plan takes the model, not a run's file" in capsys.readouterr().err


def test_plan_ends_with_3_and_says_what_to_lower_when_it_does_not_fit(config_json, capsys):
    assert main(["plan", config_json, "--gpu-memory", "12", "--two-copies"]) == 3
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "per_device_train_batch_size=4" in out
    assert "one base for trainer and engine" in out


def test_plan_as_json_holds_every_line(config_json, capsys):
    options = ["--quant", "fp4", "--no-double-quant", "--rank", "32", "--target-modules", "q_proj", "v_proj"]
    options += ["--optim", "adamw_8bit", "--no-gradient-checkpointing", "--num-generations", "4", "--sleep"]
    assert main(["plan", config_json, "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    request = found["request"]
    assert (request["optimizer"], request["sequences"], request["sleeps"]) == ("adamw_8bit", 8, True)
    assert request["spec"]["quant_type"] == "fp4"
    assert not request["spec"]["double_quant"]
    assert not request["gradient_checkpointing"]
    assert {"base, shared", "optimizer", "activations"} <= {line["name"] for line in found["lines"]}
    assert found["longest_max_length"] is None  # nothing limits it
    assert "processor" not in found  # of a card
    adapter = next(line for line in found["lines"] if line["name"] == "adapter")
    assert adapter["nbytes"] == 4 * 36 * 32 * (4096 + 4096 + 4096 + 1024)


def test_plan_for_a_cpu_names_the_processor_and_counts_nothing_of_cuda(config_json, capsys):
    assert main(["plan", config_json, "--cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["processor"] == processor().as_dict()
    assert "CUDA and vLLM" not in {line["name"] for line in found["lines"]}
    assert main(["plan", config_json, "--cpu"]) == 0
    assert f"\nprocessor: {processor()}\n" in capsys.readouterr().out


def test_plan_reads_how_a_prepared_base_is_held(tmp_path, capsys):
    base = prepare_base(make_model(tmp_path / "model"), "fp4", out=tmp_path / "base", skip_modules=["down_proj"])
    capsys.readouterr()
    assert main(["plan", str(base), "--json", "--max-length", "64"]) == 0
    spec = json.loads(capsys.readouterr().out)["request"]["spec"]
    assert spec["quant_type"] == "fp4"
    assert "down_proj" in spec["skip_modules"]


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "clip"}', "no json"])
def test_plan_of_what_is_no_language_model_ends_with_1_and_the_reason(tmp_path, capsys, content):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    assert main(["plan", str(file), "--max-length", "64"]) == 1
    assert "reading the config" in capsys.readouterr().err


def test_each_of_several_adapters_is_counted_with_gradients_optimizer_and_slots():
    config = known("Qwen3-8B")[0]
    one, eight = (plan_memory(config, max_length=1024, adapters=n, sequences=1) for n in (1, 8))
    held = {line.name: line.nbytes for line in one.lines}
    for line in eight.lines:
        times = {"adapter": 8, "gradients": 8, "optimizer": 8, "adapter, engine": 9}.get(line.name, 1)
        assert line.nbytes == times * held[line.name], line.name
    with pytest.raises(ConfigConflictError, match="adapters=0"):
        plan_memory(config, adapters=0)
