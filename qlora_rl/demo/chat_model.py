"""A small chat model that reads conversations on the spot: Qwen3's architecture, chat template and tool calls, in a
minute on two cores.

It is a real Qwen3 checkpoint with a real tokenizer, of about a million parameters: enough for the format of its
conversations and for what can be copied from them, not for arithmetic.

From the shell: `python -m qlora_rl.demo.chat_model OUT_DIR ROWS.jsonl`, of rows with `messages`, or with a question and
its answer.

Shape letters: B conversations of a batch, S positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.demo.pretraining import Progress, autocast, descend, made_once, printed
from qlora_rl.errors import QloraRLError
from qlora_rl.stages import begin, ended, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen2Tokenizer

_PAD, _END = "<|endoftext|>", "<|im_end|>"
# Of Qwen's own; those of a tool call are no special tokens there either, so that a decoded completion has them.
_SPECIAL, _PLAIN = (_PAD, "<|im_start|>", _END), ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINKING = ("<think>", "</think>")
_IGNORED = -100
_VOCABULARY = 1024


def make_chat_model(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    out_dir: str | os.PathLike[str] | None = None,
    *,
    tools: Sequence[Callable[..., Any]] = (),
    steps: int = 300,
    batch_size: int = 32,
    hidden_size: int = 128,
    layers: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Return the directory of a bf16 checkpoint that was trained on the assistants' turns; one that is there already is
    not trained again.

    Args:
        conversations: messages; the assistant's may have `tool_calls`, and then a message of role "tool" follows.
        out_dir: for a copy; by default the directory in the cache (`$QLORA_RL_CACHE`, else `~/.cache/qlora_rl`).
        tools: what the chat template shows as tools before each conversation.
        steps: of the training, with `batch_size` conversations each.
        hidden_size: a multiple of 64, the block size of the quantisation.
        layers: of the model.
        seed: of weights and order. Equal arguments, torch, processor and thread count give equal weights.
        progress: called after every step as `progress(step, steps, loss)`.

    Raises:
        FileExistsError: `out_dir` holds something else.
    """
    from transformers.utils import get_json_schema

    schemas = [get_json_schema(tool) for tool in tools]
    recipe = {
        "version": 4, "steps": steps, "batch_size": batch_size, "hidden_size": hidden_size, "layers": layers,
        "seed": seed,
        "text": hashlib.sha256(json.dumps([list(map(list, conversations)), schemas]).encode()).hexdigest(),
    }  # fmt: skip

    def make() -> tuple[PreTrainedModel, Qwen2Tokenizer]:
        begin("making the tokenizer")
        tokenizer = _make_tokenizer(conversations, schemas)
        rows = [_encode(tokenizer, each, schemas) for each in conversations]
        model = _build_model(tokenizer, hidden_size, layers, max(len(ids) for ids, _ in rows))
        begin("training the model")
        _train(model, rows, steps, batch_size, seed, progress)
        return model, tokenizer

    with ended():
        return made_once("chat", recipe, out_dir, seed, make)


def _make_tokenizer(
    conversations: Sequence[Sequence[Mapping[str, Any]]], schemas: Sequence[Mapping[str, Any]]
) -> Qwen2Tokenizer:
    from trl.chat_template_utils import qwen3_chat_template, qwen3_training_chat_template

    plain = _tokenizer(_bytes(), [], qwen3_training_chat_template)
    texts = [
        plain.apply_chat_template(list(map(dict, each)), tools=list(schemas) or None, tokenize=False)
        for each in conversations[:256]
    ]
    made: Any = learn_tokenizer(texts, qwen3_chat_template, other_marks=(*_PLAIN, *_THINKING))
    made.add_tokens([*_PLAIN, *_THINKING])
    return made


def learn_tokenizer(
    texts: Sequence[str], chat_template: str, *, special: Sequence[str] = (), other_marks: Sequence[str] = ()
) -> Qwen2Tokenizer:
    """Byte pairs of the texts' own words, as Qwen splits them: each digit is a token.

    Args:
        texts: with the chat template's marks in them, which are no words.
        chat_template: of the tokenizer.
        special: marks that are special tokens, besides those of a chat.
        other_marks: marks that are none.
    """
    import re

    from tokenizers import Tokenizer, models, trainers

    marks = "|".join(map(re.escape, (*_SPECIAL, *special, *other_marks)))
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = _tokenizer(_bytes(), [], chat_template).backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - 16, min_frequency=2, initial_alphabet=list(_bytes()), show_progress=False
    )
    learned.train_from_iterator((part for text in texts for part in re.split(marks, text)), trainer)
    held = json.loads(learned.to_str())["model"]
    merges = [tuple(pair) for pair in held["merges"]]
    return _tokenizer(held["vocab"], merges, chat_template, additional_special_tokens=[*_SPECIAL, *special])


def _tokenizer(vocabulary: dict[str, int], merges: list[Any], chat_template: str, **more: Any) -> Any:
    from transformers import Qwen2Tokenizer

    names = {"pad_token": _PAD, "eos_token": _END, "unk_token": _PAD, "padding_side": "left"}
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, chat_template=chat_template, **names, **more)


def _bytes() -> dict[str, int]:
    from tokenizers import pre_tokenizers

    return {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def _encode(
    tokenizer: Any, conversation: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[int]]:
    """Token ids, and as labels those of the assistant's turns."""
    from trl.chat_template_utils import qwen3_training_chat_template  # Qwen's own, with marks around these turns

    made = tokenizer.apply_chat_template(
        list(map(dict, conversation)),
        tools=list(schemas) or None,
        chat_template=qwen3_training_chat_template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = made["input_ids"], made["assistant_masks"]
    return ids, [each if own else _IGNORED for each, own in zip(ids, mask, strict=True)]


def _build_model(tokenizer: Qwen2Tokenizer, hidden_size: int, layers: int, longest: int) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // 32,
            num_key_value_heads=hidden_size // 64,
            head_dim=32,
            max_position_embeddings=max(1024, 2 * longest),
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def _train(
    model: PreTrainedModel,
    rows: list[tuple[list[int], list[int]]],
    steps: int,
    batch_size: int,
    seed: int,
    progress: Progress | None,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    # What all begin with (the tools' schemas) is computed once a step; the token before an assistant's first is not of
    # it.
    common = os.path.commonprefix([ids for ids, _ in rows])
    common = common[: min(next(i for i, own in enumerate(labels) if own != _IGNORED) for _, labels in rows) - 1]
    common_1_S = torch.tensor([common])

    def loss_of_batch() -> torch.Tensor:
        chosen = torch.randint(len(rows), (batch_size,), generator=rng).tolist()
        ids_B_S, labels_B_S = _padded([rows[number] for number in chosen], len(common), model.config.pad_token_id)
        with autocast():
            cache = model.model(common_1_S, use_cache=True).past_key_values
            cache.batch_repeat_interleave(batch_size)
            hidden = model.model(ids_B_S[:, :-1], past_key_values=cache).last_hidden_state
            own = labels_B_S[:, 1:] != _IGNORED
            logits = model.lm_head(hidden[own])
        return torch.nn.functional.cross_entropy(logits.float(), labels_B_S[:, 1:][own])

    descend(model, steps, loss_of_batch, progress)


def _padded(rows: list[tuple[list[int], list[int]]], start: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """From a place on, padded at the end, which causal attention never looks at from before."""
    longest = max(len(ids) for ids, _ in rows)
    ids = [own[start:] + [pad] * (longest - len(own)) for own, _ in rows]
    labels = [own[start:] + [_IGNORED] * (longest - len(own)) for _, own in rows]
    return torch.tensor(ids), torch.tensor(labels)


def read_conversations(file: str) -> list[list[dict[str, Any]]]:
    """The conversations of a data file: `messages`, or of a question and its answer a turn each.

    Raises:
        ConfigConflictError: it cannot be read.
        ValueError: a row has neither; names it.
    """
    from qlora_rl.data.calibration import calibration_rows

    talks = calibration_rows(file)
    for number, talk in enumerate(talks):
        if not isinstance(talk, list) or talk[-1].get("role") != "assistant":
            raise ValueError(
                f"reading {file}: row {number} holds no conversation. Give each row `messages`, or `question` and "
                "`answer`."
            )
    return talks


def main() -> None:
    """Make the model that the command line asks for and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m qlora_rl.demo.chat_model", description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", help="directory to write")
    parser.add_argument("rows", help="data file with `messages`, or with `question` and `answer`")
    parser.add_argument("--steps", type=int, default=60, help="(default: %(default)s)")
    with shown():
        _make(parser, parser.parse_args())


def _make(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    begin("loading the libraries")
    from qlora_rl.engine.loading import quieten

    quieten()
    try:
        talks = read_conversations(arguments.rows)
        talks.sort(key=lambda talk: sum(len(str(turn["content"])) for turn in talk))
        talks = talks[: max(1, len(talks) // 2)]  # the shorter half: it takes a third of the time
        made = make_chat_model(
            talks, arguments.out_dir, steps=arguments.steps, batch_size=8, layers=2, progress=printed(25)
        )
    except (QloraRLError, ValueError, FileExistsError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(made)


if __name__ == "__main__":
    main()
