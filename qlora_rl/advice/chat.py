"""`chat_of`: what a model's chat template can do, read or known by its name."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_rl.base.hub import hub_reachable, is_local
from qlora_rl.memory.published import published

_TALK = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


@dataclass(frozen=True)
class Chat:
    """A chat template.

    Attributes:
        is_there: the model has one.
        switch: argument of it that turns thinking off; empty where there is none.
        takes_system: it takes system messages.
    """

    is_there: bool = True
    switch: str = ""
    takes_system: bool = True


def chat_of(model: str, *, trust_remote_code: bool = False) -> Chat:
    """The chat template of a model.

    Of a tokenizer that cannot be read, what is published; of an unknown one, a template that takes everything: the run
    checks it.
    """
    from transformers import AutoTokenizer

    try:
        if not is_local(model):
            hub_reachable()
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception:  # whatever the library finds; a run says it where it loads the model
        known = published(model)
        return Chat() if known is None else Chat(known.is_chat, known.switch, known.takes_system)
    if not tokenizer.chat_template:
        return Chat(is_there=False)
    switch = "enable_thinking" if "enable_thinking" in str(tokenizer.chat_template) else ""
    try:
        tokenizer.apply_chat_template(_TALK, tokenize=False)
    except Exception:  # jinja's, raised by the template itself
        return Chat(switch=switch, takes_system=False)
    return Chat(switch=switch)
