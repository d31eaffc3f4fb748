"""`write_gguf`: a policy as one GGUF file, in the layout of llama.cpp, of architectures whose file can be loaded again and compared.

Tensor names come from the `gguf` package. The rest (which heads are permuted, what a tokenizer is called) follows
llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qlora_rl.adapter.delta import iter_weights
from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.errors import ExportError, MissingDependencyError, NotYetSupportedError, collected
from qlora_rl.export.vocabulary import CONTROL, NORMAL, SPLITS, UNUSED, USER_DEFINED, check_vocabulary

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OUT = "Export it merged, and convert that: qlora-rl export RUN --to merged --out DIR; python convert_hf_to_gguf.py DIR (of llama.cpp)."
_DOING = "writing GGUF"
# llama.cpp's name of a way to split, by what tokenizer.json says of it.
_NAMES = {pattern: name for name, pattern in SPLITS.items()}
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}
_TENSOR_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def require_gguf() -> Any:
    """The `gguf` package.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise MissingDependencyError(f"{_DOING}: {error}. Install it: pip install 'gguf>=0.17'. Or: {_OUT}") from error
    return gguf


def check_gguf(base: str | os.PathLike[str]) -> None:
    """Raise where no file can be written that would be right.

    Args:
        base: directory with config.json and tokenizer.json.

    Raises:
        NotYetSupportedError: another architecture or tokenizer; names every reason, and the way out.
        MissingDependencyError: the `gguf` package is missing.
    """
    from transformers import AutoConfig

    require_gguf()
    reasons = []
    config = AutoConfig.from_pretrained(base)
    if config.model_type not in ARCHITECTURES:
        reasons.append(f"model_type={config.model_type!r} is not one of {', '.join(ARCHITECTURES)}")
    else:
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") != "default":
            reasons.append(f"its positions are scaled (rope_type={rope['rope_type']!r})")
        if getattr(config, "use_sliding_window", False):
            reasons.append("it attends to a sliding window")
        if config.model_type != "qwen2" and (
            getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
        ):
            reasons.append("its linears have biases")
    try:
        _read_tokenizer(Path(base))
    except _Unknown as unknown:
        reasons.append(str(unknown))
    if reasons:
        raise collected(_DOING, [f"{reason}. {_OUT}" for reason in reasons], NotYetSupportedError)


def write_gguf(model: Any, base: PreparedBase, tokenizer: Any, file: Path, dtype: str, *, name: str) -> None:
    """Write the policy; `check_gguf` has found nothing.

    Args:
        model: PeftModel or bare; only read.
        base: for config and tokenizer.json.
        tokenizer: of the base.
        file: to write.
        dtype: of matrices: "bfloat16", "float16", "float32"; vectors are float32, as llama.cpp wants them.
        name: of the model, in the file.
    """
    from transformers import AutoConfig

    gguf = require_gguf()
    config = AutoConfig.from_pretrained(base.path)
    architecture = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[
        config.model_type
    ]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
    _add_config(writer, gguf, config, dtype, name)
    _add_tokenizer(writer, base.path, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[_TENSOR_TYPES[dtype]]
    for own, weight in iter_weights(model):
        theirs = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise NotYetSupportedError(f"{_DOING}: GGUF has no name for {own}. {_OUT}", module=own)
        if config.model_type == "llama" and own.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if own.endswith("q_proj.weight") else config.num_key_value_heads
            weight = _interleaved(weight, heads)
        values = weight.float().cpu().contiguous().numpy()
        if values.ndim == 1 or dtype == "float32":
            writer.add_tensor(theirs, values)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def verify_gguf(file: Path, tokenizer: Any, texts: Sequence[str]) -> int:
    """Compare the file's vocabulary with the base's tokenizer on texts and probes; gives their number back.

    Raises:
        ExportError: what differs, and the way out.
    """
    try:
        return check_vocabulary(file, tokenizer, texts)
    except ExportError as error:
        raise ExportError(f"{error} Nothing was written. {_OUT}") from error


def load_gguf(directory: Path) -> Any:
    """The one GGUF file of a directory as a transformers model, through its own reader."""
    from qlora_rl.policy.trained import load_plain

    (file,) = directory.glob("*.gguf")
    return load_plain(directory, "float32", gguf_file=file.name)


def _interleaved(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order in which llama.cpp rotates them: neighbours, where transformers rotates the two halves of a head."""
    size = weight_OI.shape[0] // heads
    return weight_OI.reshape(heads, 2, size // 2, -1).transpose(1, 2).reshape(weight_OI.shape)


def _add_config(writer: Any, gguf: Any, config: Any, dtype: str, name: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


class _Unknown(Exception):
    """A tokenizer that llama.cpp would have to be told of."""


def _read_tokenizer(base: Path) -> tuple[dict[str, Any], str]:
    """tokenizer.json, and llama.cpp's name of how it splits a text.

    Raises:
        _Unknown: it is another kind, or splits in another way.
    """
    file = base / "tokenizer.json"
    if not file.is_file():
        raise _Unknown("its tokenizer has no tokenizer.json")
    content = json.loads(file.read_text())
    model = content["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise _Unknown(f"its tokenizer is no byte-level BPE (type={model.get('type')!r})")
    if not model.get("merges"):
        raise _Unknown("its tokenizer has no merges, without which llama.cpp does not load it")
    if (content.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        raise _Unknown(f"its tokenizer rewrites the text first ({content['normalizer']['type']})")
    before = content.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0].get("add_prefix_space", True):
        return content, "gpt-2"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        known = _NAMES.get(steps[0]["pattern"].get("Regex", ""))
        if known is not None:
            return content, known
    raise _Unknown("its tokenizer splits texts in an unknown way (pre_tokenizer of tokenizer.json)")


def _add_tokenizer(writer: Any, base: Path, tokenizer: Any, size: int) -> None:
    content, splits = _read_tokenizer(base)
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens, types = [], []
    for number in range(max(size, len(by_id))):
        if number not in by_id:  # the embedding is larger than the vocabulary
            tokens.append(f"[PAD{number}]")
            types.append(UNUSED)
            continue
        tokens.append(by_id[number])
        entry = added.get(number)
        types.append(NORMAL if entry is None else CONTROL if entry["special"] else USER_DEFINED)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
    ):
        if number is not None:
            add(number)
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(begins and tokenizer.bos_token_id is not None)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
