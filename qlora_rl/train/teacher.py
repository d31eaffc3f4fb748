"""`Teacher`: what a student is compared with, token by token: its own model under another adapter, under none, or with
another prompt; or a model of its own. `ServerTeacher`: a model at a server.

TRL's DistillationTrainer asks a second model for hidden states and for its output head. Where the teacher shares the
student's base there is none: the one model answers twice. A server says logprobs of the likeliest tokens.

Letters: B sequences, T tokens, H hidden size, K + 1 candidates of a token.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from trl.trainer.utils import use_adapter

from qlora_rl.adapter.directory import adapter_in
from qlora_rl.adapter.inspected import active_adapter, bare_model, is_bare
from qlora_rl.adapter.load import add_frozen
from qlora_rl.adapter.store import CONFIG, WEIGHTS
from qlora_rl.base.attention.choice import apply_attention
from qlora_rl.base.checkpoint import PreparedBase, load_base, open_base
from qlora_rl.base.fingerprint import digest_bytes
from qlora_rl.base.source_digest import digest_file, digest_parts
from qlora_rl.engine.client import PromptLogprobs
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.sync.forward import evaluating, without_adapter
from qlora_rl.train.setup.linears import apply_linears
from qlora_rl.train.setup.tiled_mlp import tile_layers

# Words for `teacher_adapter`; anything else is a directory.
NONE, POLICY = "none", "policy"
# The name of the frozen adapter in the student's PeftModel.
NAME = "teacher"
# How many of the likeliest tokens a server is asked for: as many as vLLM gives by default.
TOP_K = 20


class Teacher(torch.nn.Module):
    """What TRL takes for the teacher's model: it has a config, an output head, and `base_model`.

    Args:
        model: the student's PeftModel, or a model of its own.
        within: makes it the teacher while it computes.
    """

    def __init__(self, model: Any, within: Callable[[], AbstractContextManager[Any]] = nullcontext):
        super().__init__()
        self._held = (model,)  # no submodule: TRL puts this one into eval mode, and the student trains
        self._within = within

    @property
    def config(self) -> Any:
        """Of the model inside."""
        return bare_model(self._held[0]).config

    def get_output_embeddings(self) -> Any:
        """The output head, which no adapter changes."""
        return bare_model(self._held[0]).get_output_embeddings()

    @torch.no_grad()
    def base_model(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **inputs: Any) -> Any:
        """The model without its head; its `last_hidden_state` is [B, T, H]. There is no dropout.

        Raises:
            ConfigConflictError: it computes NaN; nothing was learned from it.
        """
        model = self._held[0]
        with evaluating(model), self._within():
            found = bare_model(model).base_model(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        is_wrong_BT = attention_mask.bool() & ~found.last_hidden_state.sum(-1, dtype=torch.float32).isfinite()
        if is_wrong_BT.any():
            rows = is_wrong_BT.any(-1).nonzero()[:, 0].tolist()
            raise ConfigConflictError(
                f"asking the teacher: rows {rows} of {len(input_ids)} in a micro-batch give NaN or infinity, which the "
                "student would learn. Its weights are damaged, or its numbers too large for float16: load it again, in "
                "bfloat16, and resume the run (existing_run='resume')."
            )
        return found


def on_same_base(model: Any, teacher: str | os.PathLike[str], base: PreparedBase) -> tuple[Teacher, dict[str, str]]:
    """The teacher that shares the student's base, and what it is: its kind, and the digest of what never changes.

    Args:
        model: the student's PeftModel; it gets a frozen adapter where `teacher` is a directory.
        teacher: "none", "policy", or the directory of an adapter or of a run.
        base: that both are on.

    Raises:
        AdapterRejectedError: the directory holds none that fits the base.
        NotYetSupportedError: an adapter changes the output head, or the biases of the base.
    """
    if teacher == POLICY:
        found: tuple[Teacher, dict[str, str]] = Teacher(model), {"kind": POLICY}
    elif teacher == NONE:
        found = Teacher(model, partial(without_adapter, model)), {"kind": "base", "digest": base.identity}
    else:
        directory = adapter_in(teacher)
        add_frozen(model, directory, NAME, base=base.path)
        digest = digest_parts([digest_file(directory / file) for file in (CONFIG, WEIGHTS)])
        found = (
            Teacher(model, partial(_under, model, NAME)),
            {"kind": "adapter", "digest": digest, "path": os.path.abspath(directory)},
        )
    head = bare_model(model).get_output_embeddings()
    biases = [name for name, config in model.peft_config.items() if getattr(config, "bias", "none") != "none"]
    if not isinstance(head, torch.nn.Linear) or biases:
        what = f"bias={model.peft_config[biases[0]].bias!r}" if biases else "an adapter on the output head"
        raise NotYetSupportedError(
            f"choosing the teacher: {what}, which is the student's and would be the teacher's, too. Leave it out, or "
            "pass a model of its own as teacher_model."
        )
    return found


def on_own_base(model: Any) -> tuple[Teacher, dict[str, str]]:
    """The teacher that is a model of its own, and what it is."""
    apply_attention(bare_model(model))
    apply_linears(bare_model(model))
    tile_layers(bare_model(model))
    digest = digest_parts([f"{name}:{digest_bytes(tensor)}" for name, tensor in model.state_dict().items()])
    return Teacher(model), {"kind": "model", "digest": digest}


def taught_by(
    facts: Mapping[str, Any], model: Any, base: PreparedBase
) -> tuple[Any, Callable[[], AbstractContextManager[Any]]]:
    """The teacher of a run that has been trained: its model, and what makes it the teacher while it computes.

    Args:
        facts: what the run says of it; no server.
        model: the student's PeftModel, as `on_same_base` takes it.
        base: that the student is on.

    Raises:
        ConfigConflictError: it was an object that nobody can load again, or is another one now.
        BaseIncompleteError, AdapterRejectedError: it is not where it was.
    """
    if facts["kind"] != "model":
        words = {POLICY: POLICY, "base": NONE}
        found, now = on_same_base(model, words.get(facts["kind"]) or facts["path"], base)
    elif "path" in facts:
        found, now = on_own_base(load_base(open_base(facts["path"])))
    else:
        raise ConfigConflictError(
            "loading the teacher: it was a model of the process that trained, and the run does not say where it is "
            "stored. Pass a name or a prepared base as teacher_model, and train again."
        )
    if now.get("digest") != facts.get("digest"):
        raise ConfigConflictError(
            f"loading the teacher: {facts['path']} is another {facts['kind']} now (digest {now['digest'][:16]}) than "
            f"the one that taught the run ({facts['digest'][:16]}). Put that one back."
        )
    return found._held[0], found._within


def check_name_is_free(model: Any) -> None:
    """Raises: ConfigConflictError: the PeftModel that was passed has an adapter of the teacher's name."""
    if not is_bare(model) and NAME in model.peft_config:
        raise ConfigConflictError(
            f"reading the PeftModel: it holds an adapter {NAME!r} already. Remove it: model.delete_adapter({NAME!r}); "
            f"the one that is trained is {active_adapter(model)!r}."
        )


# What tokenizers are compared by, before words from all over the student's vocabulary and its added tokens, such as
# those that begin a turn; and the most tokens of all.
_TEXT = "The year 2024's 3 naïve cafés: x = f(10.5)\\n\\treturn ['ja', \"да\", '猫', '🙂']; 100,000 % \\r\\n  end"
_READ = 1024
# Mean difference of the logprobs of that text beyond which two teachers are not one: three times what bfloat16 rounds.
_OTHER = 0.1


class ServerTeacher:
    """A model at a server, asked for the likeliest tokens at each place of a completion.

    Args:
        served: the model.
        top_k: so many of the likeliest.
        tokenizer: the student's.
        vocabulary: how many tokens the student's head knows.
        before: what a run that goes on has written down of its teacher.

    Attributes:
        max_length: tokens that a sequence may have, if the server says so.
        facts: what it is: of a server of ours the digest of base and adapter, of others the name, and what it makes of
            a text. The logprobs of one model differ a little from machine to machine: those that are not further apart
            than rounding keep the digest of `before`.

    Raises:
        ConfigConflictError: it has another tokenizer.
    """

    def __init__(
        self,
        served: PromptLogprobs,
        top_k: int,
        tokenizer: Any,
        vocabulary: int,
        before: Mapping[str, Any] | None = None,
    ):
        self._served, self._top_k, self._vocabulary = served, top_k, vocabulary
        self.max_length = served.max_length
        most = min(served.max_length or _READ, _READ)
        step = max(1, 4 * len(tokenizer) // most)
        text = _TEXT + tokenizer.decode(range(0, len(tokenizer), step), skip_special_tokens=True)
        added = "".join(_added_tokens(tokenizer)[: most // 2])
        while text and len(tokenizer(text + added)["input_ids"]) >= most:
            text = text[: 3 * len(text) // 4]
        self._text = text + added
        own, (its, logprobs) = tokenizer(self._text)["input_ids"][1:], served.read(self._text)
        if own != its:
            at = next((i for i, pair in enumerate(zip(own, its, strict=False)) if pair[0] != pair[1]), 0)
            raise ConfigConflictError(
                f"choosing the teacher: {served.model!r} at {served.url} has another tokenizer than the student's "
                f"{tokenizer.name_or_path}: of {text[:40]!r} token {at + 1} is {its[at : at + 1]} there, and "
                f"{own[at : at + 1]} of the student. Take a teacher of the student's family."
            )
        self._digest, self._outages, self._read = served.digest(), served.outages, (its, logprobs)
        self.facts: dict[str, Any] = {"kind": "server", "url": served.url, "model": served.model, "top_k": top_k}
        if self._digest:
            self.facts["digest"] = self._digest
            return
        known = (before or {}).get("logprobs", [])
        if _are_close(known, logprobs):
            logprobs = known
        digest = digest_parts([json.dumps(logprobs)])
        self.facts |= {"digest": digest, "logprobs": logprobs}

    def candidates(self, prompts: list[list[int]], ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> Any:
        """Of each token of the completions: itself and the likeliest tokens [B, T, K + 1], and their logprobs in
        float32, -inf where there is none.

        Raises:
            ConfigConflictError: another model answers than at the start, or one with more tokens than the student has.
            EngineBrokenError, PromptTooLongError: as `PromptLogprobs.score`.
        """
        answers = [ids[mask].tolist() for ids, mask in zip(ids_BT, mask_BT.bool(), strict=True)]
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        found = self._served.score(whole, [len(prompt) for prompt in prompts], self._top_k)
        self._check_is_the_same()
        named = {token for places in found for candidates in places for token, _ in candidates}
        if strange := [token for token in named if not 0 <= token < self._vocabulary]:
            raise ConfigConflictError(
                f"asking the teacher at {self._served.url}: it names token {strange[0]}, and the student has "
                f"{self._vocabulary} tokens. Take a teacher of the student's family."
            )
        shape = (*ids_BT.shape, self._top_k + 1)
        tokens_BTK = torch.zeros(shape, dtype=torch.long)
        logprobs_BTK = torch.full(shape, -math.inf)
        for row, places in enumerate(found):
            for at, candidates in zip(mask_BT[row].nonzero()[:, 0].tolist(), places, strict=True):
                tokens, logprobs = zip(*candidates, strict=True)
                tokens_BTK[row, at, : len(tokens)] = torch.tensor(tokens)
                logprobs_BTK[row, at, : len(tokens)] = torch.tensor(logprobs)
        return tokens_BTK.to(ids_BT.device), logprobs_BTK.to(ids_BT.device)

    def _check_is_the_same(self) -> None:
        """Look at the digest; after an outage, or where it is gone, also at what the server makes of the text."""
        if self._served.digest() == self._digest and self._served.outages == self._outages:
            return
        tokens, logprobs = self._served.read(self._text)  # waits for one that is away
        now, self._outages = self._served.digest(), self._served.outages
        is_other = tokens != self._read[0] or not _are_close(self._read[1], logprobs)
        if is_other or (now and self._digest and now != self._digest):
            raise ConfigConflictError(
                f"asking the teacher at {self._served.url}: it serves another model than at the start (digest "
                f"{now or 'unknown'}, and {self._digest or 'unknown'} then). Serve that again, and resume the run from "
                "its last checkpoint (existing_run='resume')."
            )


def _added_tokens(tokenizer: Any) -> list[str]:
    """Texts of the tokens that were added to the vocabulary, the special ones among them."""
    try:
        return [token.content for token in tokenizer.added_tokens_decoder.values()]
    except NotImplementedError:  # transformers' MistralCommonBackend, which reads none in a text
        return []


def _are_close(known: Sequence[float], logprobs: Sequence[float]) -> bool:
    """Logprobs of one text are no further apart than rounding makes those of one model."""
    if len(known) != len(logprobs):
        return False
    gaps = [abs(one - other) for one, other in zip(known, logprobs, strict=True)]
    return math.fsum(gaps) <= _OTHER * len(gaps)


@contextmanager
def _under(model: Any, adapter: str) -> Iterator[None]:
    """Within it another adapter is active; what is trained stays what it was."""
    trained = {p: p.requires_grad for p in model.parameters()}
    try:
        with use_adapter(model, adapter):
            yield
    finally:
        for parameter, wanted in trained.items():
            parameter.requires_grad_(wanted)
