"""`Conversation`: answers of the policy; also of the base or of its teacher for comparison, since adapters can be
switched for an answer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.errors import ConfigConflictError
from qlora_rl.inference.prompts import model_inputs, with_images
from qlora_rl.inference.rows import turn
from qlora_rl.inference.sampling import check_sampling, end_tokens, sample
from qlora_rl.inference.trained import TrainedRun
from qlora_rl.stages import begin, ended

if TYPE_CHECKING:
    from qlora_rl.engine.client import PromptLogprobs

# How long a server may be away, in seconds.
_WAIT_S = 10.0


class Conversation:
    """One talk with a policy, on its 4-bit base, in transformers.

    With a chat template what was said before is part of the next prompt; without one each text is continued by itself.

    Args:
        trained: the run.
        is_base_only: the adapter is left out.
        system: first message; needs a chat template. `None`: that of the run, "": none.
        max_tokens: of an answer; `None`: as many as in the training of the run, 256 where it sampled nothing.
        temperature: 0 is greedy.
        top_p: share of the probability that is sampled from.
        seed: of the sampling.
        uses_template: `False`: texts are continued as they are; `None`: where there is a chat template, but for a run
            whose `prompt_template` makes prompts without it.

    Attributes:
        max_tokens: of an answer.
        cut_off_after: tokens of the newest answer, where it reached `max_tokens` or the model's last position without
            an end; otherwise `None`.
        lacks: what it read in training and does not read here; empty where it reads all.

    Raises:
        ConfigConflictError: a number is out of its range.
    """

    def __init__(
        self,
        trained: TrainedRun,
        *,
        is_base_only: bool = False,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.7,
        top_p: float = 1.0,
        seed: int | None = None,
        uses_template: bool | None = None,
    ):
        self.max_tokens = trained.max_tokens if max_tokens is None else max_tokens
        self.cut_off_after: int | None = None
        check_sampling("chatting", self.max_tokens, temperature, top_p)
        self.tokenizer = trained.processor()
        with ended():
            begin("loading the base" if is_base_only else "loading the policy")
            self._model = trained.load_base_alone() if is_base_only else trained.load()
        self.lacks, self._trained = "", trained
        # What makes the model who answers while it does; a server in place of the model; what a text is put between.
        self._within: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._server: PromptLogprobs | None = None
        self._around: Sequence[str] = ("", "")
        self._data = None if uses_template is False else trained.data
        if uses_template is None:
            is_text = self._data is not None and self._data.prompt_template is not None and self._data.format == "plain"
            uses_template = bool(self.tokenizer.chat_template) and not is_text
        self.uses_template = uses_template
        self._sampling = (temperature, top_p)
        self._ends, self._stop = end_tokens(self._model.generation_config) | set(trained.ends), trained.stop
        self._autocast, self._template_kwargs = trained.autocast, trained.template_kwargs
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        if system is None and uses_template and self._data is not None:
            system = self._data.system_prompt
        self._system: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.forget()

    @ended()
    def with_teacher(self) -> Conversation:
        """The same talk with who has taught the run in a distillation, who reads what it read then; a teacher on the
        policy's own base is no second model.

        Raises:
            ConfigConflictError: there was none, or it is not there any more, or another now.
            Exception: of a server as `PromptLogprobs` has it.
        """
        facts = self._trained.config.get("teacher")
        if not facts:
            raise ConfigConflictError(
                f"chatting: {self._trained.name} had no teacher, as its training was no distillation. Leave it out."
            )
        begin("loading the teacher")
        talk = copy.copy(self)
        talk._generator = torch.Generator().manual_seed(self._generator.initial_seed())
        if facts["kind"] == "server":
            from qlora_rl.engine.client import PromptLogprobs

            key = facts.get("key_file")
            talk._server = PromptLogprobs(facts["url"], model=facts.get("model"), api_key_file=key, wait_s=_WAIT_S)
            if "logprobs" not in facts and talk._server.digest() != facts["digest"]:  # it is one of ours
                raise ConfigConflictError(
                    f"chatting: the teacher at {facts['url']} serves another {talk._server.model!r} than the one that "
                    "taught the run. Serve that again."
                )
        else:
            from qlora_rl.train.teacher import taught_by

            talk._model, talk._within = taught_by(facts, self._model, self._trained.base)
        if reads := facts.get("reads"):
            talk._system, talk._around = reads["before"], reads["text"]
        if "prompt" in facts and (not reads or (reads["before"] and not self.uses_template)):
            talk.lacks = f"what stood in {facts['prompt']} besides the question"
        talk.forget()
        return talk

    def forget(self) -> None:
        """Start a new conversation."""
        self._said: list[dict[str, Any]] = list(self._system)

    def answer(self, text: str, images: Sequence[Any] = ()) -> Iterator[str]:
        """The answer to a text, piece by piece; it is part of the talk when the last piece was taken.

        Args:
            text: what is said.
            images: PIL images that go before it; they stay part of the talk.

        Raises:
            ConfigConflictError: the model has no position left, takes no images or no messages, or there is nothing to
                go on from.
        """
        self.cut_off_after = None
        text = turn(text, self._data).join(self._around)
        prompt: Any = text
        if self.uses_template:
            prompt = [*self._said, *with_images([{"role": "user", "content": text}], images)]
        if images and (self._server is not None or not self.uses_template):
            who = "a teacher's server gets text alone" if self._server is not None else "a text is continued as it is"
            raise ConfigConflictError(f"answering: images are parts of messages, and {who}. Leave them out.")
        pieces = []
        for piece in self._stream(model_inputs(self.tokenizer, prompt, **self._template_kwargs)):
            pieces.append(piece)
            yield piece
        if self.uses_template:
            self._said = [*prompt, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, inputs: dict[str, Any]) -> Iterator[str]:
        """Text of the sampled tokens; a character of several tokens comes when it is complete."""
        sampled, shown, has_ended = [], "", False
        for token in self._sample(inputs):
            sampled.append(token)
            has_ended = token in self._ends or self._holds_stop(sampled)
            text = self.tokenizer.decode(sampled, skip_special_tokens=True)
            if not text.endswith("\ufffd") and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
            if has_ended:
                break
        rest = self.tokenizer.decode(sampled, skip_special_tokens=True)[len(shown) :]
        if rest:
            yield rest
        if sampled and not has_ended:
            self.cut_off_after = len(sampled)

    def _holds_stop(self, sampled: list[int]) -> bool:
        """A text that ended a completion in the training is in it."""
        if not self._stop or len(sampled) <= (self._stop.get("min_tokens") or 0):
            return False
        text = self.tokenizer.decode(sampled, skip_special_tokens=self._stop.get("skip_special_tokens", True))
        return any(each in text for each in self._stop["stop"])

    def _sample(self, inputs: dict[str, Any]) -> Iterator[int]:
        ids = inputs.pop("input_ids")[0].tolist()
        temperature, top_p = self._sampling
        positions = self._model.config.get_text_config().max_position_embeddings
        if self._server is not None:
            positions = self._server.max_length or positions
        if not 0 < len(ids) < positions:
            told = "Start over (/new), or say less" if ids else "Say something"
            raise ConfigConflictError(
                f"answering: the prompt has {len(ids)} tokens, and the model reads 1 to {positions - 1} before an "
                f"answer. {told}."
            )
        if self._server is not None:
            seed = int(torch.randint(2**31, (), generator=self._generator))
            sampling = {"temperature": temperature, "top_p": top_p, "seed": seed, "stop_token_ids": sorted(self._ends)}
            yield from self._server.answer(ids, min(self.max_tokens, positions - len(ids)), **sampling, **self._stop)
            return
        with self._within():
            yield from sample(
                self._model,
                ids,
                self.max_tokens,
                self._generator,
                temperature=temperature,
                top_p=top_p,
                autocast=self._autocast,
                inputs=inputs,
                ends=self._ends,
            )
