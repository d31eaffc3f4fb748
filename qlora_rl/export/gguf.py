"""`write_gguf`: a policy as one GGUF file, in the layout of llama.cpp, of architectures whose file can be loaded again
and compared.

Tensor names come from the `gguf` package. The rest (which heads are permuted, what a tokenizer is called) follows
llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.documents import read_object
from qlora_rl.errors import ExportError, MissingDependencyError, NotYetSupportedError, raise_where
from qlora_rl.export.vocabulary import CONTROL, NORMAL, SPLITS, UNUSED, USER_DEFINED, check_vocabulary

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OUT = (
    "Export it merged, and convert that: qlora-rl export RUN --to merged --out DIR; python convert_hf_to_gguf.py "
    "DIR (of llama.cpp)."
)
_DOING = "writing GGUF"
# llama.cpp's name of a way to split, by what tokenizer.json says of it.
_NAMES = {pattern: name for name, pattern in SPLITS.items()}
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_TENSOR_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
# Weights of a row that share a scale in q8_0.
_BLOCK = 32


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
    require_gguf()
    config = AutoConfig.from_pretrained(base)
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    way = rope.get("rope_type", "default")
    has_biases = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    found = [
        (kind not in ARCHITECTURES, f"model_type={kind!r} is not one of {', '.join(ARCHITECTURES)}"),
        (kind in ARCHITECTURES and way != "default", f"its positions are scaled (rope_type={way!r})"),
        (
            kind in ARCHITECTURES and getattr(config, "use_sliding_window", False),
            "it attends to a sliding window",
        ),
        (kind in ARCHITECTURES and kind != "qwen2" and has_biases, "its linears have biases"),
    ]
    try:
        _read_tokenizer(Path(base))
    except _Unknown as unknown:
        found.append((True, str(unknown)))
    raise_where(_DOING, [(is_so, f"{reason}. {_OUT}") for is_so, reason in found], NotYetSupportedError)


def write_gguf(
    model: Any,
    base: PreparedBase,
    tokenizer: Any,
    file: Path,
    dtype: str,
    *,
    name: str,
    ends: Sequence[int] = (),
) -> None:
    """Write the policy; `check_gguf` has found nothing.

    Args:
        model: PeftModel or bare; only read.
        base: for config and tokenizer.json.
        tokenizer: of the base.
        file: to write.
        dtype: of matrices: "bfloat16", "float16", "float32", "q8_0"; vectors are float32, as llama.cpp wants them.
        name: of the model, in the file.
        ends: tokens that end a completion; besides the tokenizer's EOS a file has a place for two.
    """
    gguf = require_gguf()
    config = AutoConfig.from_pretrained(base.path)
    architecture = gguf.MODEL_ARCH[config.model_type.upper()]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
    for end, add in zip(_further(tokenizer, ends), (writer.add_eot_token_id, writer.add_eom_token_id), strict=False):
        add(end)
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
        elif dtype == "q8_0" and values.shape[1] % _BLOCK:
            writer.add_tensor(theirs, values.astype("float16"))
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _further(tokenizer: Any, ends: Sequence[int]) -> list[int]:
    return [end for end in ends if end != tokenizer.eos_token_id]


def write_modelfile(
    directory: Path, tokenizer: Any, *, model: str, ends: Sequence[int] = (), texts: Sequence[str] = ()
) -> None:
    """Write a Modelfile for `ollama create`: the file, what ends an answer, and the chat template where it is one that
    is known here.

    Args:
        directory: of the GGUF file.
        tokenizer: whose chat template it is.
        model: after FROM.
        ends: tokens that end a completion.
        texts: that end one.
    """
    lines = [f"FROM {model}"]
    template, stops = _ollama_template(tokenizer)
    if template:
        lines.append(f'TEMPLATE """{template}"""')
    elif isinstance(getattr(tokenizer, "chat_template", None), str):  # no other is written
        lines.append(
            "# The chat template is in the GGUF file (tokenizer.chat_template); Ollama takes it where it knows it, "
            "otherwise write TEMPLATE."
        )
    stops += [*(tokenizer.decode([each]) for each in _further(tokenizer, ends)), *texts]
    # Ollama reads no escapes there: what has a quote or ends a line cannot be named.
    lines += [f'PARAMETER stop "{stop}"' for stop in dict.fromkeys(stops) if not {'"', "\n"} & {*stop}]
    (directory / "Modelfile").write_text("\n".join(lines) + "\n")


def _ollama_template(tokenizer: Any) -> tuple[str, list[str]]:
    """Ollama's form of a chat template that renders as ChatML, and the texts that end an answer; empty for any
    other."""
    if not getattr(tokenizer, "chat_template", None):
        return "", []
    talks = (
        [("user", "a b")],
        [("system", "be\nkind"), ("user", "c"), ("assistant", "d"), ("user", "e")],
    )
    for talk in talks:
        messages = [{"role": role, "content": content} for role, content in talk]
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:
            return "", []
        wanted = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in talk)
        if rendered != wanted + "<|im_start|>assistant\n":
            return "", []
    template = (
        "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
    )
    return template, ["<|im_end|>"]


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
    from qlora_rl.inference.trained import load_plain

    (file,) = directory.glob("*.gguf")
    return load_plain(directory, "float32", gguf_file=file.name, config=_config_of(file))


def is_read_by_transformers(base: Path) -> bool:
    """transformers' reader of GGUF passes over the size of a head, which for some architectures is then the default."""
    config = AutoConfig.from_pretrained(base)
    without = type(config)(hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads)
    return getattr(config, "head_dim", None) == getattr(without, "head_dim", None)


def _config_of(file: Path) -> Any:
    """The file's config as transformers reads it, with the size of a head that the file has."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    fields = require_gguf().GGUFReader(file).fields
    if hasattr(config, "head_dim"):
        (size,) = (field.contents() for name, field in fields.items() if name.endswith(".attention.key_length"))
        config.head_dim = int(size)
    return config


def _interleaved(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order in which llama.cpp rotates them: neighbours, where transformers rotates the two halves of a
    head."""
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
    try:
        content = read_object(file)
        return content, _way_to_split(content)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Unknown(f"its tokenizer.json is damaged ({type(error).__name__}: {error})") from error


def _way_to_split(content: dict[str, Any]) -> str:
    model = content["model"]
    is_sentencepiece = bool(model.get("byte_fallback")) and "<0x00>" in model["vocab"]
    if model.get("type") != "BPE" or is_sentencepiece:
        kind = "SentencePiece's kind of BPE" if is_sentencepiece else f"type={model.get('type')!r}"
        raise _Unknown(f"its tokenizer is no byte-level BPE ({kind})")
    if not model.get("merges"):
        raise _Unknown("its tokenizer has no merges, without which llama.cpp does not load it")
    normalizer = content.get("normalizer") or {"type": "Sequence", "normalizers": []}
    rewrites = [each["type"] for each in normalizer.get("normalizers", [normalizer]) if each["type"] != "NFC"]
    if rewrites:
        raise _Unknown(f"its tokenizer rewrites the text first ({', '.join(rewrites)})")
    if other := _other_decoders(content):
        raise _Unknown(f"its tokenizer decodes in another way than by bytes (decoder={', '.join(other)})")
    before = content.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers") or [before]
    kinds = [step.get("type") for step in steps]
    if kinds[-1] == "ByteLevel" and steps[-1].get("use_regex", True) and not steps[-1].get("add_prefix_space", True):
        if kinds[:-1] == []:
            return "gpt-2"
        if kinds[:-1] == ["Digits"] and steps[0].get("individual_digits"):
            return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        known = _NAMES.get(steps[0]["pattern"].get("Regex", ""))
        if known is not None:
            return known
    raise _Unknown("its tokenizer splits texts in an unknown way (pre_tokenizer of tokenizer.json)")


def _other_decoders(content: dict[str, Any]) -> list[str]:
    """The kinds of decoders that give another text than the bytes of the tokens; empty where the bytes are the text.

    Some tokenizers name several steps, of which those made for SentencePiece find nothing among these tokens.
    """
    decoder = content.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    tokens = [*content["model"]["vocab"], *(each["content"] for each in content.get("added_tokens") or [])]
    letters = {letter for token in tokens for letter in token}

    def changes(step: dict[str, Any]) -> bool:
        if step.get("type") == "Replace":
            searched = step["pattern"].get("String")
            return not searched or set(searched) <= letters
        if step.get("type") == "ByteFallback":
            return any(re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) for token in tokens)
        return step.get("type") not in ("ByteLevel", "Fuse")

    other = [str(step.get("type")) for step in steps if changes(step)]
    return other or ([] if "ByteLevel" in kinds else ["no ByteLevel"])


def _add_tokenizer(writer: Any, base: Path, tokenizer: Any, size: int) -> None:
    content, splits = _read_tokenizer(base)
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    # llama.cpp loads no file with more tokens than rows, and the embedding may be larger than the vocabulary.
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]
    types = [_type_of(added.get(number)) if number in by_id else UNUSED for number in range(size)]
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


def _type_of(added: dict[str, Any] | None) -> int:
    return NORMAL if added is None else CONTROL if added["special"] else USER_DEFINED
