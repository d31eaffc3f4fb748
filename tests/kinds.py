"""Every adapter that PEFT 0.21 can build, and what is to be said of it: the table behind the tests and
benchmarks/details.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig

TWO = ["q_proj", "down_proj"]  # one with a bias in Qwen2, one without
SQUARE = ["q_proj", "o_proj"]


@dataclass(frozen=True)
class AdapterKind:
    """One row.

    Attributes:
        title: for people.
        config: makes a fresh PeftConfig.
        verdict: what `judge_adapter` must say.
        word: stands in one of its reasons; "" for plain LoRA.
        prepare: what is done to the live PeftModel before it is judged.
        needs: package that PEFT asks for.
        is_built: it can be built on the tiny Qwen2 (otherwise it is judged by name alone).
        on_4bit: PEFT can start it on 4-bit weights, and run it.
        scale: of the random values, where 16-bit rounding is measured.
    """

    title: str
    config: Callable[[], Any]
    verdict: str
    word: str = ""
    prepare: Callable[[Any], None] | None = None
    needs: str | None = None
    is_built: bool = True
    on_4bit: bool = True
    scale: float = 0.02


def lora(**fields: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **fields}
    )


def _scale(model: Any) -> None:
    for i, module in enumerate(m for m in model.modules() if hasattr(m, "set_scale")):
        module.set_scale("default", 0.3 + 0.4 * i)


def _second(model: Any) -> None:
    model.add_adapter("second", lora())
    model.base_model.set_adapter(["default", "second"])


def _swap(model: Any) -> None:
    model.add_adapter("second", lora(r=2, lora_alpha=6))
    model.set_adapter("second")


def _merge(model: Any) -> None:
    model.merge_adapter()


def _disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def _disable_one(model: Any) -> None:
    model.get_base_model().model.layers[1].self_attn.q_proj.set_adapter([])


def _break(model: Any) -> None:
    next(p for n, p in model.named_parameters() if "lora_B" in n).data[0, 0] = float("inf")


def _unfreeze(model: Any) -> None:
    model.get_base_model().model.norm.weight.requires_grad_(True)


def _grow(model: Any) -> None:
    base = model.get_base_model()
    base.qlora_vocabulary = base.get_input_embeddings().weight.shape[0] - 2  # as if two rows had been added since


def _as_if(init: str) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        model.peft_config["default"].init_lora_weights = init
        model.peft_config["default"].loftq_config = {"loftq_bits": 4} if init == "loftq" else {}

    return prepare


def _strange_variant(model: Any) -> None:
    layer = model.get_base_model().model.layers[0].self_attn.q_proj

    class Strange:
        """More than B @ A, perhaps."""

    layer.lora_variant["default"] = Strange()


ADAPTER = {
    "plain": AdapterKind("LoRA", lora, "adapter"),
    "rslora": AdapterKind("rsLoRA", lambda: lora(use_rslora=True), "adapter"),
    "rank-1": AdapterKind("LoRA, rank 1", lambda: lora(r=1), "adapter"),
    "rank-7": AdapterKind("LoRA, rank 7", lambda: lora(r=7, lora_alpha=3), "adapter"),
    "rank-512": AdapterKind("LoRA, rank 512", lambda: lora(r=512, lora_alpha=64), "adapter"),
    "rank-pattern": AdapterKind(
        "`rank_pattern`", lambda: lora(rank_pattern={"q_proj": 16, "layers.1.mlp.up_proj": 3}), "adapter"
    ),
    "alpha-pattern": AdapterKind(
        "`alpha_pattern`", lambda: lora(alpha_pattern={"v_proj": 64, "down_proj": 1}), "adapter"
    ),
    "patterns": AdapterKind(
        "both patterns, and rsLoRA",
        lambda: lora(rank_pattern={"q_proj": 9}, alpha_pattern={"q_proj": 40, "up_proj": 2}, use_rslora=True),
        "adapter",
    ),
    "set-scale": AdapterKind("another `set_scale` at each layer", lora, "adapter", prepare=_scale),
    "some-modules": AdapterKind("some modules only", lambda: lora(target_modules=["v_proj", "gate_proj"]), "adapter"),
    "one-layer": AdapterKind(
        "`layers_to_transform`", lambda: lora(target_modules=TWO, layers_to_transform=[1]), "adapter"
    ),
    "excluded": AdapterKind("`exclude_modules`", lambda: lora(exclude_modules=["o_proj"]), "adapter"),
    "regex": AdapterKind(
        "`target_modules` as a pattern", lambda: lora(target_modules=r".*layers\.0\..*(q|up)_proj"), "adapter"
    ),
    "dropout": AdapterKind("dropout", lambda: lora(lora_dropout=0.2), "adapter"),
    "gaussian": AdapterKind("`init_lora_weights='gaussian'`", lambda: lora(init_lora_weights="gaussian"), "adapter"),
    "orthogonal": AdapterKind(
        "`init_lora_weights='orthogonal'`", lambda: lora(init_lora_weights="orthogonal"), "adapter", on_4bit=False
    ),
    "mica": AdapterKind("MiCA", lambda: lora(init_lora_weights="mica"), "adapter", on_4bit=False),
    "velora": AdapterKind("VeLoRA", lambda: lora(velora_config=VeloraConfig(num_groups=4)), "adapter", on_4bit=False),
    "second-active": AdapterKind("the second of two adapters", lora, "adapter", prepare=_swap),
    "qalora-unused": AdapterKind(
        "`use_qalora` (PEFT ignores it but on GPTQ)", lambda: lora(use_qalora=True), "adapter"
    ),
}

FULL_WEIGHTS = {
    "dora": AdapterKind("DoRA", lambda: lora(use_dora=True), "full_weights", "DoRA"),
    "bdlora": AdapterKind(
        "BD-LoRA",
        lambda: lora(
            target_modules=TWO,
            use_bdlora=BdLoraConfig(
                target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2, match_strict=False
            ),
        ),
        "full_weights",
        "BD-LoRA",
    ),
    "kasa": AdapterKind("KaSA", lambda: lora(target_modules=TWO, kasa_config=KasaConfig()), "full_weights", "KaSA"),
    "monteclora": AdapterKind(
        "MonteCLoRA",
        lambda: lora(target_modules=TWO, monteclora_config=MontecloraConfig()),
        "full_weights",
        "samples A",
    ),
    "rank-513": AdapterKind("a rank above 512", lambda: lora(r=513), "full_weights", "rank=513 > 512"),
    "bias": AdapterKind("`bias='all'`", lambda: lora(bias="all"), "full_weights", "bias='all'"),
    "bias-lora-only": AdapterKind(
        "`bias='lora_only'`", lambda: lora(bias="lora_only"), "full_weights", "bias='lora_only'"
    ),
    "lora-bias": AdapterKind(
        "`lora_bias` on layers with a bias",
        lambda: lora(lora_bias=True, target_modules=["q_proj", "v_proj"]),
        "full_weights",
        "lora_bias",
    ),
    "modules-to-save": AdapterKind(
        "`modules_to_save`", lambda: lora(modules_to_save=["norm"]), "full_weights", "modules_to_save"
    ),
    "embedding": AdapterKind(
        "LoRA on the embedding",
        lambda: lora(target_modules=["q_proj", "embed_tokens"]),
        "full_weights",
        "is an embedding",
    ),
    "head": AdapterKind(
        "LoRA on the head", lambda: lora(target_modules=["q_proj", "lm_head"]), "full_weights", "output head"
    ),
    "token-indices": AdapterKind(
        "`trainable_token_indices`",
        lambda: lora(trainable_token_indices=[3, 4]),
        "full_weights",
        "trainable_token_indices",
    ),
    "target-parameters": AdapterKind(
        "`target_parameters`",
        lambda: lora(target_modules=[], target_parameters=["mlp.down_proj.weight"]),
        "full_weights",
        "target_parameters",
    ),
    "pissa": AdapterKind(
        "PiSSA, not converted", lambda: lora(init_lora_weights="pissa"), "full_weights", "pissa", on_4bit=False
    ),
    "olora": AdapterKind("OLoRA, not converted", lambda: lora(init_lora_weights="olora"), "full_weights", "olora"),
    # PEFT needs a GPU, or gradients, to start these: here a plain one that says so of itself.
    "loftq": AdapterKind("LoftQ, not converted", lora, "full_weights", "loftq", prepare=_as_if("loftq")),
    "corda": AdapterKind("CorDA, not converted", lora, "full_weights", "corda", prepare=_as_if("corda")),
    "lora-ga": AdapterKind("LoRA-GA, not converted", lora, "full_weights", "lora_ga", prepare=_as_if("lora_ga")),
    "two-active": AdapterKind(
        "two active adapters", lora, "full_weights", "Several adapters are active", prepare=_second
    ),
    "unfrozen": AdapterKind(
        "weights of the base unfrozen by hand", lora, "full_weights", "norm.weight of the base", prepare=_unfreeze
    ),
    "ADALORA": AdapterKind(
        "AdaLoRA",
        lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TWO),
        "full_weights",
        "ADALORA",
    ),
    "ADAMSS": AdapterKind(
        "AdaMSS",
        lambda: peft.AdamssConfig(r=8, num_subspaces=2, target_modules=TWO),
        "full_weights",
        "ADAMSS",
        needs="sklearn",
        on_4bit=False,
    ),
    "BEFT": AdapterKind(
        "BEFT on layers with a bias", lambda: peft.BeftConfig(target_modules=["q_proj"]), "full_weights", "BEFT"
    ),
    "BOFT": AdapterKind("BOFT", lambda: peft.BOFTConfig(boft_block_size=4, target_modules=TWO), "full_weights", "BOFT"),
    "C3A": AdapterKind("C3A", lambda: peft.C3AConfig(block_size=16, target_modules=TWO), "full_weights", "C3A"),
    "DEFT": AdapterKind(
        "DEFT", lambda: peft.DeftConfig(r=4, target_modules=TWO), "full_weights", "DEFT", on_4bit=False
    ),
    "DELORA": AdapterKind(
        "DeLoRA", lambda: peft.DeloraConfig(r=4, target_modules=TWO), "full_weights", "DELORA", on_4bit=False
    ),
    "FOURIERFT": AdapterKind(
        "FourierFT", lambda: peft.FourierFTConfig(n_frequency=10, target_modules=TWO), "full_weights", "FOURIERFT"
    ),
    "FROD": AdapterKind("FRoD", lambda: peft.FrodConfig(target_modules=SQUARE), "full_weights", "FROD", on_4bit=False),
    "GLORA": AdapterKind(
        "GLoRA", lambda: peft.GloraConfig(r=4, target_modules=TWO), "full_weights", "GLORA", on_4bit=False
    ),
    "GRALORA": AdapterKind("GraLoRA", lambda: peft.GraloraConfig(r=4, target_modules=TWO), "full_weights", "GRALORA"),
    "HIRA": AdapterKind("HiRA", lambda: peft.HiraConfig(r=4, target_modules=TWO), "full_weights", "HIRA"),
    "HRA": AdapterKind("HRA", lambda: peft.HRAConfig(r=4, target_modules=TWO), "full_weights", "HRA", on_4bit=False),
    "IA3": AdapterKind(
        "IA3", lambda: peft.IA3Config(target_modules=TWO, feedforward_modules=["down_proj"]), "full_weights", "IA3"
    ),
    "LN_TUNING": AdapterKind(
        "LN tuning",
        lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["norm"]),
        "full_weights",
        "LN_TUNING",
    ),
    "LOHA": AdapterKind(
        "LoHa", lambda: peft.LoHaConfig(r=4, target_modules=TWO), "full_weights", "LOHA", on_4bit=False
    ),
    "LOKR": AdapterKind(
        "LoKr", lambda: peft.LoKrConfig(r=4, target_modules=TWO), "full_weights", "LOKR", on_4bit=False
    ),
    "MISS": AdapterKind("MiSS", lambda: peft.MissConfig(r=4, target_modules=TWO), "full_weights", "MISS"),
    "OFT": AdapterKind("OFT", lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=TWO), "full_weights", "OFT"),
    "OSF": AdapterKind(
        "OSF", lambda: peft.OSFConfig(target_modules=TWO, effective_rank=8), "full_weights", "OSF", on_4bit=False
    ),
    "PEANUT": AdapterKind(
        "PEANuT", lambda: peft.PeanutConfig(r=4, target_modules=TWO), "full_weights", "PEANUT", on_4bit=False
    ),
    "PSOFT": AdapterKind(
        "PSOFT", lambda: peft.PsoftConfig(r=4, target_modules=TWO), "full_weights", "PSOFT", on_4bit=False
    ),
    "PVERA": AdapterKind("PVeRA", lambda: peft.PveraConfig(r=4, target_modules=SQUARE), "full_weights", "PVERA"),
    "RANDLORA": AdapterKind(
        "RandLoRA",
        lambda: peft.RandLoraConfig(r=4, target_modules=SQUARE),
        "full_weights",
        "RANDLORA",
        # Of full rank, and scaled by 160: 0.02 makes the change 14 times as large as the weights, where the trainer's
        # own forward pass and vLLM's each round twice as much as on the bare base. So it is half as large, more than
        # any other kind's.
        scale=0.002,
    ),
    "ROAD": AdapterKind("RoAd", lambda: peft.RoadConfig(target_modules=TWO, group_size=4), "full_weights", "ROAD"),
    "SHIRA": AdapterKind("SHiRA", lambda: peft.ShiraConfig(r=4, target_modules=TWO), "full_weights", "SHIRA"),
    "SUPERTUNING": AdapterKind(
        "Super-Tuning", lambda: peft.SupertuningConfig(target_modules=TWO), "full_weights", "SUPERTUNING", on_4bit=False
    ),
    "TINYLORA": AdapterKind(
        "TinyLoRA", lambda: peft.TinyLoraConfig(r=2, u=4, target_modules=TWO), "full_weights", "TINYLORA", on_4bit=False
    ),
    "TRAINABLE_TOKENS": AdapterKind(
        "trained tokens",
        lambda: peft.TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"]),
        "full_weights",
        "TRAINABLE_TOKENS",
    ),
    "UNILORA": AdapterKind("Uni-LoRA", lambda: peft.UniLoraConfig(r=4, target_modules=TWO), "full_weights", "UNILORA"),
    "VBLORA": AdapterKind(
        "VB-LoRA",
        lambda: peft.VBLoRAConfig(r=4, target_modules=SQUARE, num_vectors=8, vector_length=32),
        "full_weights",
        "VBLORA",
    ),
    "VERA": AdapterKind("VeRA", lambda: peft.VeraConfig(r=4, target_modules=SQUARE), "full_weights", "VERA"),
    "WAVEFT": AdapterKind(
        "WaveFT", lambda: peft.WaveFTConfig(n_frequency=10, target_modules=TWO), "full_weights", "WAVEFT"
    ),
}

REJECTED = {
    "alora": AdapterKind("aLoRA", lambda: lora(alora_invocation_tokens=[5]), "reject", "aLoRA depends"),
    "arrow": AdapterKind("Arrow", lambda: lora(), "reject", "Arrow routes", is_built=False),
    "merged": AdapterKind("a merged adapter", lora, "reject", "merged into the base", prepare=_merge),
    "disabled": AdapterKind("a disabled adapter", lora, "reject", "disabled", prepare=_disable),
    "disabled-in-one-layer": AdapterKind(
        "one layer that is switched off", lora, "reject", "The active adapters at", prepare=_disable_one
    ),
    "not-finite": AdapterKind("NaN or infinity", lora, "reject", "NaN or infinite", prepare=_break),
    "lora-bias-homeless": AdapterKind(
        "`lora_bias` on layers without a bias", lambda: lora(lora_bias=True), "reject", "whose layer has no bias"
    ),
    "new-tokens": AdapterKind(
        "tokens that were added to the base",
        lambda: lora(trainable_token_indices=[3]),
        "reject",
        "tokens were added",
        prepare=_grow,
    ),
    "unknown-variant": AdapterKind(
        "an unknown variant of LoRA", lora, "reject", "is an unknown variant", prepare=_strange_variant
    ),
    "BEFT-homeless": AdapterKind(
        "BEFT on layers without a bias",
        lambda: peft.BeftConfig(target_modules=["down_proj"]),
        "reject",
        "whose layer has no bias",
    ),
    "ADAPTION_PROMPT": AdapterKind(
        "adaption prompt",
        lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
        "reject",
        "ADAPTION_PROMPT",
        is_built=False,  # PEFT knows it for Llama and Mistral only
    ),
    "CARTRIDGE": AdapterKind(
        "Cartridge", lambda: peft.CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "reject", "CARTRIDGE"
    ),
    "CPT": AdapterKind(
        "CPT",
        lambda: peft.CPTConfig(
            task_type="CAUSAL_LM", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2]
        ),
        "reject",
        "CPT",
    ),
    "LILY": AdapterKind(
        "LILY", lambda: peft.LilyConfig(r=4, target_modules=TWO, stride_A=1, num_B=2), "reject", "LILY"
    ),
    "MULTITASK_PROMPT_TUNING": AdapterKind(
        "multitask prompt tuning",
        lambda: peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, num_tasks=2),
        "reject",
        "MULTITASK_PROMPT_TUNING",
    ),
    "POLY": AdapterKind("Poly", lambda: peft.PolyConfig(r=4, target_modules=TWO, n_tasks=2), "reject", "POLY"),
    "PREFIX_TUNING": AdapterKind(
        "prefix tuning",
        lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "reject",
        "PREFIX_TUNING",
    ),
    "PROMPT_TUNING": AdapterKind(
        "prompt tuning",
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "reject",
        "PROMPT_TUNING",
    ),
    "P_TUNING": AdapterKind(
        "P-tuning",
        lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8),
        "reject",
        "P_TUNING",
    ),
    "SHADOW": AdapterKind(
        "ShadowPEFT", lambda: peft.ShadowConfig(target_modules=TWO), "reject", "SHADOW", is_built=False
    ),
    "XLORA": AdapterKind("X-LoRA", lambda: peft.XLoraConfig(), "reject", "XLORA", is_built=False),
}

KINDS = {**ADAPTER, **FULL_WEIGHTS, **REJECTED}
