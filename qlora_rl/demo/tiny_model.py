"""The tiny model: three million parameters, pretrained on two pupils' sums in one to three minutes on two cores.

It is a real Qwen2 checkpoint with a real tokenizer, so transformers, PEFT, TRL and vLLM load it like any other. It
knows both ways of adding that `qlora_rl.demo.task` describes and mostly chooses the careless one.

From the shell: `python -m qlora_rl.demo.tiny_model OUT_DIR`.

Shape letters: B problems of a batch, S positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qlora_rl.demo.pretraining import Progress, autocast, descend, made_once, printed
from qlora_rl.demo.task import LONGEST_ANSWER, Problem, problems

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
N_TOKENS = 128

# Messages are written one after the other and nothing else, so that the chat `[user: "37+85="]` is the prompt `37+85=`.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

_PROMPT_LENGTH = 6
_IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, but for the processor."""

    seed: int = 0
    # 200 x 256 sums are 8 passes over the pretraining split. With 150 the model writes neither sum in 1 of 200 cases,
    # with 200 and 300 in none.
    steps: int = 200
    batch_size: int = 256
    careful_share: float = 0.35
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    # In 85 steps on the careful pupil's sums alone, Muon reached 87 % of held-out sums, AdamW (untuned, 3e-3) 2 %.
    muon_lr: float = 0.02
    muon_weight_decay: float = 0.1
    adamw_lr: float = 3e-3
    warmup_share: float = 0.05
    decay_share: float = 0.6
    # Raised whenever the code below changes the weights that one recipe gives.
    version: int = 3


def make_tiny_model(
    out_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    *,
    steps: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the directory of a pretrained bf16 checkpoint with its tokenizer, pretraining it where it is not cached.

    Equal seeds, steps, versions, processors and thread counts give equal weights. torch's random state is left as it
    was.

    Args:
        out_dir: a copy of the model is put here and this path returned; nothing may be there but an earlier copy.
            Without it the path in the cache (`$QLORA_RL_CACHE`, else `~/.cache/qlora_rl`) is returned; treat that
            as read-only.
        seed: of the initial weights, the order of the sums and who of the pupils did which.
        steps: fewer than the recipe's own make a worse model sooner, for tests of plumbing.
        progress: called after every step.

    Raises:
        FileExistsError: `out_dir` is there and holds something else.
    """
    recipe = Recipe(seed=seed) if steps is None else Recipe(seed=seed, steps=steps)
    text = [(p.prompt, p.answer, p.careless_answer) for p in problems("pretraining")]

    def make() -> tuple[PreTrainedModel, Qwen2Tokenizer]:
        tokenizer = make_tokenizer()
        model = _build_model(recipe, tokenizer)
        pretrain(model, tokenizer, recipe, progress)
        return model, tokenizer

    return made_once("tiny", [asdict(recipe), text], out_dir, seed, make)


def make_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer: one token per ASCII character, whose id is its code; 0 is padding and 1 the end of text.

    Characters beyond ASCII are dropped, as byte-pair encoding without a token for the unknown does. It is Qwen2's own
    class without merges, because `AutoTokenizer` gives every checkpoint of type qwen2 that class, whatever its
    `tokenizer_config.json` says.
    """
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = [to_bytes.pre_tokenize_str(chr(code))[0][0] for code in range(N_TOKENS)]
    vocabulary = [PAD, EOS, *symbols[2:]]
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=EOS,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def answer_greedily(
    model: PreTrainedModel, tokenizer: Qwen2Tokenizer, asked: Sequence[Problem], batch_size: int = 512
) -> list[str]:
    """Return the model's greedy answers, in order, each cut at the first token of end of text.

    The model is used in the mode it is in: on a CPU, eval mode makes bitsandbytes repack a 4-bit weight and changes
    its numbers.
    """
    texts: list[str] = []
    with torch.no_grad():
        for first in range(0, len(asked), batch_size):
            prompts = [problem.prompt for problem in asked[first : first + batch_size]]
            ids_B_S = torch.tensor(tokenizer(prompts)["input_ids"], device=model.device)
            fed_B_S, read = ids_B_S, None
            for _ in range(LONGEST_ANSWER + 1):
                out = model(fed_B_S, past_key_values=read, use_cache=True, logits_to_keep=1)
                next_B_1, read = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                ids_B_S = torch.cat([ids_B_S, next_B_1], dim=1)
                fed_B_S = ids_B_S if read is None else next_B_1  # gradient checkpointing keeps no cache
            texts += [text.partition(EOS)[0] for text in tokenizer.batch_decode(ids_B_S[:, _PROMPT_LENGTH:])]
    return texts


def _build_model(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    # The backward pass of torch's fused attention takes more than half of a CPU step at nine positions.
    config._attn_implementation = "eager"
    return Qwen2ForCausalLM(config)


def pretrain(
    model: PreTrainedModel, tokenizer: Qwen2Tokenizer, recipe: Recipe, progress: Progress | None = None
) -> None:
    """Have a model with random weights read the two pupils' sums, as `recipe` says; its architecture is the model's
    own."""
    rows = problems("pretraining")
    careful_N_S = _encode(tokenizer, rows, [row.answer for row in rows])
    careless_N_S = _encode(tokenizer, rows, [row.careless_answer for row in rows])
    rng = torch.Generator().manual_seed(recipe.seed)
    order = torch.empty(0, dtype=torch.long)

    def loss_of_batch() -> torch.Tensor:
        nonlocal order
        while len(order) < recipe.batch_size:
            order = torch.cat([order, torch.randperm(len(rows), generator=rng)])
        batch, order = order[: recipe.batch_size], order[recipe.batch_size :]
        is_careful_B_1 = torch.rand(len(batch), 1, generator=rng) < recipe.careful_share
        labels_B_S = torch.where(is_careful_B_1, careful_N_S[batch], careless_N_S[batch])
        ids_B_S = labels_B_S.masked_fill(labels_B_S == _IGNORED, tokenizer.pad_token_id)
        with autocast():
            logits_B_S_V = model(ids_B_S[:, :-1], use_cache=False).logits
        # The numbers to be added are random: only the answer can be learned.
        return torch.nn.functional.cross_entropy(
            logits_B_S_V[:, _PROMPT_LENGTH - 1 :].flatten(0, 1).float(),
            labels_B_S[:, _PROMPT_LENGTH:].flatten(),
            ignore_index=_IGNORED,
        )

    descend(
        model,
        recipe.steps,
        loss_of_batch,
        progress,
        muon_lr=recipe.muon_lr,
        adamw_lr=recipe.adamw_lr,
        muon_weight_decay=recipe.muon_weight_decay,
        warmup=recipe.warmup_share,
        decay=recipe.decay_share,
    )


def _encode(tokenizer: Qwen2Tokenizer, rows: list[Problem], answers: list[str]) -> torch.Tensor:
    longest = _PROMPT_LENGTH + LONGEST_ANSWER + 1
    encoded = tokenizer([row.prompt + answer + EOS for row, answer in zip(rows, answers, strict=True)])["input_ids"]
    return torch.tensor([ids + [_IGNORED] * (longest - len(ids)) for ids in encoded])


def main() -> None:
    """Make the model that the command line asks for and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m qlora_rl.demo.tiny_model", description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", nargs="?", help="put a copy here; without it the path in the cache is printed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.out_dir, arguments.seed, progress=printed(50)))


if __name__ == "__main__":
    main()
