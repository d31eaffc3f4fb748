"""`check_vocabulary`: a tokenizer rebuilt from a GGUF file's own fields, as llama.cpp builds its own, against the
tokenizer of the base.

What llama.cpp makes of the fields is read off its `llama-vocab.cpp`: the way to split belongs to the name in
`tokenizer.ggml.pre`, and with it whether a word that is a token is taken without its merges. It knows no normalisation:
texts are compared in NFC.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qlora_rl.errors import ExportError

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How the text is split before merging, by llama.cpp's name of it: as tokenizer.json has it. "gpt-2" is ByteLevel's
# own, "smollm" that with each digit apart.
SPLITS = {"qwen2": _LETTERS + r"\p{N}" + _REST, "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST}
# Of these names a whole word that is a token stays one, whatever the merges say.
_TAKES_WORDS = ("llama-bpe",)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# Contractions, digits, spaces and line ends, letters of several bytes, signs in a row, code.
_PROBES = (
    "It's what we've said: I'LL say they'D, don't you?",
    "1 22 333 4444 55555, 3.14 and 1e-9; 2026-01-31, +49 (0)30/12345678",
    "  two  spaces\n\n\tand a tab \r\nends   \n \n",
    "Caf\u00e9 na\u00efve \u00dcbergr\u00f6\u00dfe \u2014 \u6771\u4eac\u3078 \u043f\u0440\u0438\u0432\u0435\u0442 "
    "\u0645\u0631\u062d\u0628\u0627 \u0967\u0968\u0969 \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "def f(x):\n    return x**2 != 7  # ...!?\n",
    "",
)


def check_vocabulary(file: Path, tokenizer: Any, texts: Sequence[str] = ()) -> int:
    """Tokens, merges, splitting, added tokens and BOS of the file give every text the ids that the base's tokenizer
    gives it.

    Args:
        file: GGUF.
        tokenizer: of the base.
        texts: to compare on, as well as probes of our own, every added token in a sentence, and every token's own text.

    Returns:
        How many texts were compared.

    Raises:
        ExportError: names the first text that differs, or the field.
    """
    import gguf

    held = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items() if "tokenizer." in name}
    template = tokenizer.chat_template
    wanted = {
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.merges": _merges(tokenizer),
        "tokenizer.chat_template": template if isinstance(template, str) else None,
    }
    for name, value in wanted.items():
        if held.get(name) != value:
            shown, ours = (repr(each) if len(repr(each)) < 200 else "another" for each in (held.get(name), value))
            raise ExportError(f"checking the GGUF file's vocabulary: {name} is {shown}, of the base {ours}.")
    try:
        rebuilt = _rebuild(held)
    except Exception as error:
        raise ExportError(
            f"checking the GGUF file's vocabulary: no tokenizer can be made of its fields ({type(error).__name__}: "
            f"{error})."
        ) from error
    before = tokenizer.backend_tokenizer.pre_tokenizer
    for text in map(_nfc, _PROBES):
        ours, theirs = (each.pre_tokenize_str(text) for each in (rebuilt.pre_tokenizer, before))
        if [piece for piece, _ in ours] != [piece for piece, _ in theirs]:
            raise ExportError(
                f"checking the GGUF file's vocabulary: llama.cpp's way {held['tokenizer.ggml.pre']!r} splits {text!r} "
                "otherwise than the base's tokenizer."
            )
    tokens, types = held["tokenizer.ggml.tokens"], held["tokenizer.ggml.token_type"]
    added = [token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    own = [rebuilt.decoder.decode([token]) for token, kind in zip(tokens, types, strict=True) if kind == NORMAL]
    asked = [*_PROBES, *texts, *(form for token in added for form in (token, f"a{token}b", f"one {token} two"))]
    asked = [_nfc(text) for text in [*asked, *(text for text in own if "\ufffd" not in text)]]
    first = [held["tokenizer.ggml.bos_token_id"]] if held.get("tokenizer.ggml.add_bos_token") else []
    found = [first + each.ids for each in rebuilt.encode_batch(asked, add_special_tokens=False)]
    for text, ours, theirs in zip(asked, found, tokenizer(asked, verbose=False).input_ids, strict=True):
        if ours != list(theirs):
            raise ExportError(
                "checking the GGUF file's vocabulary: a tokenizer made of its fields, as llama.cpp makes one, gives "
                f"{text!r} the ids {ours[:16]}, and the base's tokenizer {list(theirs)[:16]}."
            )
    return len(asked)


def _merges(tokenizer: Any) -> list[str]:
    """Of the base's tokenizer, as GGUF writes them."""
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _rebuild(held: dict[str, Any]) -> Any:
    """A tokenizer out of the fields alone."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if held["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"tokenizer.ggml.model is {held['tokenizer.ggml.model']!r}, not 'gpt2'")
    tokens, way = held["tokenizer.ggml.tokens"], held["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ")) for merge in held["tokenizer.ggml.merges"]]
    made = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=way in _TAKES_WORDS)
    )
    if way in ("gpt-2", "smollm"):
        own = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = own if way == "gpt-2" else pre_tokenizers.Sequence([digits, own])
    else:
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLITS[way]), "isolated"), as_bytes])
    made.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, held["tokenizer.ggml.token_type"], strict=True):
        if kind in (CONTROL, USER_DEFINED):
            made.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])
    return made
