"""Vision-language models: what of them is 4-bit, what belongs to their identity, and what is rejected before anything
starts."""

import copy
import json
import re
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support import make_model
from transformers import AutoConfig, AutoProcessor
from vision import SERVED, make_vision_model, picture

from qlora_rl import (
    AdapterRejectedError,
    BaseIncompleteError,
    BaseMismatchError,
    ConfigConflictError,
    FakeEngine,
    NotYetSupportedError,
    compare,
    fingerprint_base,
    judge_adapter,
    load_base,
    prepare_base,
    verify_base,
)
from qlora_rl.base.checkpoint import open_base
from qlora_rl.base.fingerprint import fingerprint_stored, linear_names, recorded_fingerprint
from qlora_rl.base.model_classes import check_vision_type, vision_parts
from qlora_rl.contracts import EngineCapabilities
from qlora_rl.engine.images import ImagePrompt, _find, token_ids
from qlora_rl.memory.shape import skeleton
from qlora_rl.sync.plan import plan_sync

pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
LANGUAGE = r"model\.language_model\..*_proj"
TOWERS = ("model.visual.", "model.vision_tower.")


@pytest.fixture(scope="module", params=SERVED)
def source(request, tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


@pytest.fixture(scope="module")
def vision_base(source, tmp_path_factory):
    return prepare_base(source, out=tmp_path_factory.mktemp("bases") / "base")


def test_the_language_model_is_4_bit_and_the_tower_keeps_its_values(source, vision_base):
    leaves = recorded_fingerprint(vision_base.path).leaves
    kinds = {name: leaf.kind for name, leaf in leaves.items() if name.endswith("weight")}
    tower = {name for name in kinds if name.startswith(TOWERS)}
    assert tower
    assert {kinds[name] for name in tower} == {"bfloat16"}
    assert {name for name, kind in kinds.items() if kind == "nf4"} == {
        n for n in kinds if "language_model.layers" in n and "_proj" in n
    }
    model = load_base(vision_base)
    assert compare(fingerprint_base(model), recorded_fingerprint(vision_base.path)).state == "equal"
    original = type(model).from_pretrained(source, dtype="auto")
    parts, theirs = tuple(f"{name}." for name in vision_parts(model)), dict(original.named_parameters())
    seen = {name: ours for name, ours in model.named_parameters() if name.startswith(parts)}
    assert len(seen) > 10
    assert all(torch.equal(ours, theirs[name]) for name, ours in seen.items())
    assert set(linear_names(vision_base.path)) == {
        "down_proj", "gate_proj", "gate_up_proj", "k_proj", "o_proj", "q_proj", "qkv_proj", "up_proj", "v_proj",
    }  # fmt: skip


def test_a_tower_in_4_bits_by_choice_but_for_widths_that_are_no_whole_blocks(source, tmp_path):
    base = prepare_base(source, quantize_tower=True, out=tmp_path / "base")
    assert base.spec.label == "nf4-dq-64-tower"
    leaves = recorded_fingerprint(base.path).leaves
    model = load_base(base)
    assert compare(fingerprint_base(model), recorded_fingerprint(base.path)).state == "equal"
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and f"{n}.".startswith(TOWERS)]
    assert len(linears) > 5
    inner = {name.replace("vision_tower.", "vision_tower.vision_model."): name for name in linears}
    found = {
        name: leaves[f"{name if name + '.weight' in leaves else longer}.weight"].kind for longer, name in inner.items()
    }
    assert set(found.values()) == {"nf4"}
    wider = prepare_base(
        source, blocksize=128, quantize_tower=True, out=tmp_path / "wider"
    )  # the tower's layers are 64 wide
    kinds = {
        n: leaf.kind
        for n, leaf in recorded_fingerprint(wider.path).leaves.items()
        if n.startswith(TOWERS) and n.endswith("weight")
    }
    assert {"nf4", "bfloat16"} <= set(kinds.values())
    assert compare(fingerprint_base(load_base(wider)), recorded_fingerprint(wider.path)).state == "equal"
    with pytest.raises(ConfigConflictError, match="quantize_tower=True"):
        prepare_base(make_model(tmp_path / "text"), quantize_tower=True, out=tmp_path / "other")


def test_images_change_what_the_loaded_base_computes(vision_base):
    model, processor = load_base(vision_base), AutoProcessor.from_pretrained(vision_base.path)
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "2"}]}]
    )
    with torch.no_grad():
        one, other = (
            model(**processor(text=[text], images=[picture(seed)], return_tensors="pt")).logits for seed in (0, 1)
        )
    assert not torch.equal(one[0, -1], other[0, -1])


def test_a_byte_of_the_tower_that_is_another_one_is_found(vision_base, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(vision_base.path, changed)
    file = changed / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith(TOWERS) and ".1.mlp." in name and name.endswith("weight"))
    tensors[name].view(torch.uint8).view(-1)[0] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BaseIncompleteError, match=r"model\.safetensors: its bytes differ"):
        open_base(changed)
    model = load_base(vision_base)
    with torch.no_grad():
        other = load_base(vision_base)
        other.get_parameter(name.replace("tower.vision_model", "tower")).data.view(torch.uint8).view(-1)[0] ^= 1
    with pytest.raises(BaseMismatchError, match=name.replace(".", r"\.")):
        verify_base(model, FakeEngine(other))


def test_a_frozen_adapter_of_the_tower_next_to_it_is_no_part_of_the_one_that_is_trained(vision_base):
    model = load_base(vision_base)
    tower = next(n for n, m in model.named_modules() if n.startswith(TOWERS) and isinstance(m, torch.nn.Linear))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=LANGUAGE))
    adapted.add_adapter("teacher", LoraConfig(r=2, target_modules=[tower]))
    assert judge_adapter(adapted).kind == "adapter"
    adapted.set_adapter("teacher")
    assert judge_adapter(adapted).kind == "full_weights"


def test_another_processor_config_is_another_base(vision_base, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(vision_base.path, changed)
    file = changed / "processor_config.json"
    content = json.loads(file.read_text())
    content["image_processor"]["size"] = {"longest_edge": 28 * 28 * 8, "shortest_edge": 28 * 28}
    file.write_text(json.dumps(content))
    entries = compare(recorded_fingerprint(vision_base.path), fingerprint_stored(changed)).entries
    assert [entry.how for entry in entries] == ["processor"]


TOWER, PROJECTOR = (
    r"model\.(visual\.blocks|vision_tower\.encoder\.layers)\..*",
    r"model\.visual\.(merger|deepstack_merger_list\.\d+)\.(mlp\.[02]|linear_fc[12])",
)
PLACEMENTS = {
    "language": (LoraConfig(target_modules=LANGUAGE), "adapter", ""),
    "attention by name": (LoraConfig(target_modules=["q_proj", "v_proj"]), "adapter", ""),
    "one layer": (LoraConfig(target_modules=["q_proj"], layers_to_transform=[1]), "adapter", ""),
    "language MLP": (LoraConfig(target_modules=r"model\.language_model\..*\.(gate|up|down)_proj"), "adapter", ""),
    "tower attention": (LoraConfig(target_modules=rf"{TOWER}\.attn\.qkv"), "full_weights",
    "model.visual.blocks.0.attn.qkv and 1 more"),
    "tower by name": (LoraConfig(target_modules=["qkv", "q_proj"]), "full_weights",
    "model.visual.blocks.0.attn.qkv and 1 more"),
    "tower MLP": (LoraConfig(target_modules=rf"{TOWER}\.mlp\.(.*fc[12]|.*_proj)"), "full_weights",
    "model.visual.blocks.0.mlp."),
    "projector": (LoraConfig(target_modules=PROJECTOR), "full_weights", "model.visual."),
    "patches": (LoraConfig(target_modules=r"model\.visual\.patch_embed\.proj"), "reject",
        "model.visual.patch_embed.proj"),
    "all-linear": (LoraConfig(target_modules="all-linear"), "full_weights", "model.visual.blocks.0."),
    "regex over both": (LoraConfig(target_modules=r".*\.(q_proj|qkv)"), "full_weights",
    "model.visual.blocks.0.attn.qkv"),
    "DoRA on the tower": (LoraConfig(target_modules=["qkv"], use_dora=True), "full_weights",
    "model.visual.blocks.0.attn.qkv"),
    "IA3": (IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]), "full_weights", "IA3, not LoRA"),
    "DoRA": (LoraConfig(target_modules=LANGUAGE, use_dora=True), "full_weights", "DoRA"),
    "embeddings": (LoraConfig(target_modules=["embed_tokens"]), "full_weights", "model.language_model.embed_tokens"),
    "head": (LoraConfig(target_modules=["q_proj", "lm_head"]), "full_weights", "lm_head"),
    "whole projector": (LoraConfig(target_modules=LANGUAGE, modules_to_save=["merger"]), "full_weights", "['merger']"),
    "rows of embeddings": (LoraConfig(target_modules=LANGUAGE, trainable_token_indices=[5]), "full_weights", "=[5]"),
    "all biases": (LoraConfig(target_modules=LANGUAGE, bias="all"), "full_weights", "bias='all'"),
}  # fmt: skip
# Gemma's tower calls its linears as the language model does, its projector is no linear, and its head is tied to the
# embeddings.
_SEEN, _TIED = "model.vision_tower.encoder.layers.", "The model ties its output head to the embedding"
PLACEMENTS_OF_GEMMA = PLACEMENTS | {
    "attention by name": (LoraConfig(target_modules=["q_proj", "v_proj"]), "full_weights", "_proj and 3 more belong"),
    "one layer": (LoraConfig(target_modules=["q_proj"], layers_to_transform=[1]), "full_weights",
    f"{_SEEN}1.self_attn.q_proj belong"),
    "tower attention": (LoraConfig(target_modules=rf"{TOWER}\.self_attn\.out_proj"), "full_weights",
    f"{_SEEN}0.self_attn.out_proj and 1 more"),
    "tower by name": (LoraConfig(target_modules=["out_proj", "fc1"]), "full_weights",
    f"{_SEEN}0.self_attn.out_proj and 3 more"),
    "tower MLP": (LoraConfig(target_modules=rf"{TOWER}\.mlp\.fc[12]"), "full_weights", f"{_SEEN}0.mlp."),
    "projector": (LoraConfig(target_modules=LANGUAGE, target_parameters=["mm_input_projection_weight"]),
        "full_weights", "target_parameters"),
    "patches": (LoraConfig(target_modules=["patch_embedding"]), "reject",
        "model.vision_tower.embeddings.patch_embedding"),
    "all-linear": (LoraConfig(target_modules="all-linear"), "full_weights", f"{_SEEN}0."),
    "regex over both": (LoraConfig(target_modules=r".*\.(q_proj|o_proj)"), "full_weights",
    f"{_SEEN}0.self_attn.q_proj"),
    "DoRA on the tower": (LoraConfig(target_modules=["q_proj"], use_dora=True), "full_weights",
    f"{_SEEN}0.self_attn.q_proj"),
    "IA3": (IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]), "full_weights", "IA3, not LoRA"),
    "embeddings": (LoraConfig(target_modules=["embed_tokens"]), "reject", _TIED),
    "head": (LoraConfig(target_modules=["o_proj", "lm_head"]), "reject", _TIED),
    "whole projector": (LoraConfig(target_modules=LANGUAGE, modules_to_save=["multi_modal_projector"]), "full_weights",
    "['multi_modal_projector']"),
}  # fmt: skip


@pytest.mark.parametrize("where", PLACEMENTS)
def test_an_adapter_is_served_where_it_is_applied_and_rejected_by_name_elsewhere(vision_base, where):
    is_gemma = json.loads((vision_base.path / "config.json").read_text())["model_type"] == "gemma3"
    config, kind, named = (PLACEMENTS_OF_GEMMA if is_gemma else PLACEMENTS)[where]
    verdict = judge_adapter(get_peft_model(load_base(vision_base), copy.deepcopy(config)))
    assert verdict.kind == kind
    engine = EngineCapabilities(
        "vllm", True, False, 16, 128, "bfloat16", False, takes_images=True
    )  # full weights: none
    if kind == "adapter":
        assert plan_sync(verdict, engine).strategy == "lora_adapter"
        return
    assert named in verdict.reasons[0]
    assert (
        kind != "reject" or named == _TIED or any(LANGUAGE in reason for reason in verdict.reasons)
    )  # where it could be
    with pytest.raises((AdapterRejectedError, ConfigConflictError), match=re.escape(named)):
        plan_sync(verdict, engine)


def test_the_fake_engine_ends_completions_of_a_vision_language_model(vision_base):
    model = load_base(vision_base)
    with FakeEngine(model) as engine:
        assert engine.eos_token_id == model.config.text_config.eos_token_id
        assert len(engine.generate([[5, 6]], max_tokens=2, temperature=0).completion_ids[0]) in (1, 2)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("paligemma", "paligemma takes images.*not been compared"), ("llava", "llava takes images.*not been compared")],
)
def test_what_was_not_compared_is_rejected(kind, reason):
    config = AutoConfig.for_model(kind)
    with pytest.raises(NotYetSupportedError, match=rf"{reason}.*Use one of gemma3, qwen2_vl, qwen2_5_vl, qwen3_vl"):
        check_vision_type(config)


def test_memory_is_not_planned_for_a_type_that_is_not_supported():
    with pytest.raises(NotYetSupportedError, match="not supported"):
        skeleton(AutoConfig.for_model("llava"))


def test_the_places_of_an_image_are_found_among_the_ids():
    assert token_ids(ImagePrompt([1, 2], ("image",))) == [1, 2]
    assert _find([5, 5], [1, 5, 5, 5], 2) == 2
    assert _find([5, 6], [1, 5, 5, 5], 0) == -1
