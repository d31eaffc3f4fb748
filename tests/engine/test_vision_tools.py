"""Tools beside images in GRPO: a tool that answers with text or with a picture, and the model goes on from both."""

import dataclasses
import json
from pathlib import Path

import pytest
import trl
import vision
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoProcessor
from trl import GRPOConfig
from vision import make_vision_model, picture

from qlora_rl import QLoRAGRPOTrainer, prepare_base
from qlora_rl.engine.images import ImagePrompt, token_ids

pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def show(n: int) -> list:
    """
    Shows a picture.

    Args:
        n: Which.
    """
    return [{"type": "image", "image": picture(40 + n)}, {"type": "text", "text": "here"}]


def tell(n: int) -> str:
    """
    Tells a number.

    Args:
        n: Which.
    """
    return str(n)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small Qwen3-VL with the chat template of the large ones, which writes tools."""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_vl.jinja").read_text()
    with pytest.MonkeyPatch.context() as patch:
        plain, tokenizer_of = vision._qwen3_vl, vision._tokenizer

        def tokenizer(tokens):
            made, ids = tokenizer_of(tokens)
            made.add_special_tokens({"additional_special_tokens": [*tokens, "<|im_start|>", "<|im_end|>"]})
            made.add_tokens(list(MARKS))
            return made, ids

        def with_tools():
            kind, config, processor = plain()
            processor.tokenizer.eos_token = "<|im_end|>"
            config.text_config.eos_token_id = processor.tokenizer.eos_token_id
            config.text_config.max_position_embeddings = 1024
            processor.chat_template = processor.tokenizer.chat_template = template
            return kind, config, processor

        patch.setattr(vision, "_tokenizer", tokenizer)
        patch.setattr(vision, "_qwen3_vl", with_tools)
        made = make_vision_model(tmp_path_factory.mktemp("vision") / "model", "qwen3_vl")
    return prepare_base(made, out=tmp_path_factory.mktemp("bases") / "base")


def calling(engine, tokenizer, name, seen):
    """The engine's `generate`, in which each second prompt without an answer of the tool calls it; what the model
    writes is cut short."""
    call = tokenizer.encode(f'<tool_call>\n{{"name": "{name}", "arguments": {{"n": 1}}}}\n</tool_call><|im_end|>')
    answered, generate = tokenizer.convert_tokens_to_ids("<tool_response>"), engine.generate

    def generated(prompts, *arguments, **fields):
        rollout = generate(prompts, *arguments, **fields)
        ids, logprobs = [row[:5] for row in rollout.completion_ids], [row[:5] for row in rollout.logprobs]
        for number, prompt in enumerate(prompts):
            is_answered = answered in token_ids(prompt)
            seen.add((is_answered, len(prompt.images) if isinstance(prompt, ImagePrompt) else 0))
            if number % 2 == 0 and not is_answered:
                whole = [*token_ids(prompt), *call]
                if isinstance(prompt, ImagePrompt):
                    whole = dataclasses.replace(prompt, ids=whole)
                scored = engine.score([whole])[0]
                ids[number], logprobs[number] = list(call), scored[-len(call) :]
        return dataclasses.replace(rollout, completion_ids=ids, logprobs=logprobs)

    return generated


@pytest.mark.parametrize(
    ("tool", "images", "expected"),
    [
        (tell, [1, 2, 0, 1], {(False, 0), (False, 1), (False, 2), (True, 0), (True, 1), (True, 2)}),
        (show, [1, 2, 0, 1], {(False, 0), (False, 1), (False, 2), (True, 1), (True, 2), (True, 3)}),
        (show, None, {(False, 0), (True, 1)}),
    ],
)
def test_trainer_and_engine_agree_on_what_follows_the_answer_of_a_tool(base, tmp_path, tool, images, expected):
    question = [{"role": "user", "content": "bright?"}]
    rows = [
        {"prompt": question} | ({} if images is None else {"images": [picture(i) for i in range(images[n % 4])]})
        for n in range(8)
    ]
    args = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_completion_length=160, max_steps=4,
        learning_rate=1e-3,
        vllm_max_model_length=1024, max_tool_calling_iterations=1, beta=0.0, use_cpu=True, bf16=True,
        save_strategy="no", report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    seen = set()
    with QLoRAGRPOTrainer(
        model=base,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=args,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=8, target_modules=r"model\.language_model\..*_proj"),
        tools=[tool],
    ) as trainer:
        tokenizer = AutoProcessor.from_pretrained(base.path).tokenizer
        trainer.engine.generate = calling(trainer.engine, tokenizer, tool.__name__, seen)
        trainer.train()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["tools/call_frequency"] for line in found} == {0.5}
    assert {line["tools/failure_frequency"] for line in found} == {0.0}
    assert max(line["mismatch_kl"] for line in found) < 1e-3
    assert seen == expected
