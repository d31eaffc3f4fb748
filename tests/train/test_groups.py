"""Each prompt is tokenised once for all of its completions, and TRL gets what it would have made."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer
from trl import GRPOTrainer, RLOOTrainer
from trl.chat_template_utils import qwen3_chat_template

from qlora_rl.train.rollouts.batches import GroupedPrompts, groups_of

TEXTS = ["1+1=", "1+1=", "20+35=", "1+1=", "20+35=", "20+35="]
CHATS = [[{"role": "system", "content": "Add."}, {"role": "user", "content": text}] for text in TEXTS]
PARTS = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in TEXTS]


def test_neighbours_that_are_equal_are_a_group():
    assert groups_of([]) == ([], [])
    assert groups_of(TEXTS) == ([0, 2, 3, 4], [0, 0, 1, 2, 3, 3])
    assert groups_of(copy.deepcopy(CHATS)) == groups_of(TEXTS)


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize(("prompts", "asked"), [(TEXTS, 4), (CHATS, 4), (PARTS, 6)])
def test_token_ids_are_those_of_trl(trainer, prompts, asked, model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = qwen3_chat_template
    fields = {"processing_class": tokenizer, "environment_factories": None, "tools": None, "_is_vlm": False}
    fields |= {"chat_template": None, "chat_template_kwargs": {}}
    seen = []

    def counted(self, prompts):
        seen.append(len(prompts))
        return trainer._tokenize_prompts(self, prompts)

    theirs = type("Theirs", (), {**fields, "_tokenize_prompts": counted})
    ours = type("Ours", (GroupedPrompts, theirs), {})
    ids, images, more = ours()._tokenize_prompts(copy.deepcopy(prompts))
    assert (ids, images, more) == theirs()._tokenize_prompts(copy.deepcopy(prompts))
    assert seen == [asked, len(prompts)]
    assert len({id(row) for row in ids}) == len(prompts)  # TRL may append to one of them


def test_environments_are_left_to_trl(model_dir):
    """Each row has tools of its own there."""

    class Theirs:
        processing_class = AutoTokenizer.from_pretrained(model_dir)
        environment_factories = SimpleNamespace()

        def _tokenize_prompts(self, prompts):
            return prompts

    assert type("Ours", (GroupedPrompts, Theirs), {})()._tokenize_prompts(TEXTS) is TEXTS


def test_a_run_is_the_same_bit_for_bit(make_trainer, config, monkeypatch, tmp_path):
    def trained(name):
        trainer = make_trainer(args=config(max_steps=2, output_dir=str(tmp_path / name)))
        trainer.train()
        return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]

    ours = trained("ours")
    monkeypatch.delattr(GroupedPrompts, "_tokenize_prompts")
    assert all(torch.equal(a, b) for a, b in zip(ours, trained("theirs"), strict=True))
