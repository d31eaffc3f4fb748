"""`PromptLogprobs`: an OpenAI-compatible server that says what its model would have put at each place of a sequence,
and what it answers.

`prompt_logprobs` is vLLM's field of /v1/completions, and `qlora-rl serve`'s with it. HTTP only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import httpx

from qlora_rl.documents import parse_object
from qlora_rl.engine.client.engine import check_url, find_key
from qlora_rl.engine.client.http_errors import START, AwayError, Patience, rejection, said_in
from qlora_rl.errors import (
    AccessDeniedError,
    ConfigConflictError,
    EngineBrokenError,
    EngineUnsupportedError,
    PromptTooLongError,
    collected,
)

Candidates = list[tuple[int, float]]
"""Tokens of one place with their logprobs, the one that stands there first, then the likeliest others."""

# Of one request: enough for vLLM to be busy, and an answer of tens of megabytes.
_TOKENS = 16_384
# By how much float32 probabilities may add up to more than one.
_TOO_MUCH = 1e-3
# What vLLM writes for -inf, which JSON has not (`clamp_prompt_logprobs`).
_MINUS_INFINITY = -9999.0
# What vLLM else takes from the model's generation_config.json.
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_PLAIN |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# What comes of reading an answer that is built in another way than it should be.
_MISFITS = (AttributeError, KeyError, TypeError, ValueError, OverflowError)


class PromptLogprobs:
    """A model at a server, which is asked and never changed; a request without an answer is repeated.

    Args:
        url: such as "http://127.0.0.1:8000".
        model: its name there. By default "policy" where `qlora-rl serve` serves an adapter, else the only base.
        api_key_file: a file with the key; by default none is sent: the environment's is that of the rollout server.
        timeout_s: of one request, in seconds.
        wait_s: how long the server may be away, in seconds.

    Attributes:
        max_length: tokens that a sequence may have, if the server says so.
        outages: how often a request had no answer and was repeated.

    Raises:
        EngineBrokenError: nobody answers within `wait_s`.
        AccessDeniedError: the key is missing or wrong.
        ConfigConflictError: no such model; names those that are there.
        EngineUnsupportedError: what answers is no such server.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key_file: str | os.PathLike[str] | None = None,
        timeout_s: float = 1800.0,
        wait_s: float = 120.0,
    ):
        self.url, self.wait_s, self.outages = check_url(url), wait_s, 0
        self._client = httpx.Client(
            base_url=self.url,
            headers={} if api_key_file is None else {"authorization": f"Bearer {find_key(None, api_key_file)}"},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            trust_env=False,  # the key must not wander
        )
        found = self._ask("GET", "/v1/models")
        try:
            cards = {str(card["id"]): card for card in found["data"]}
            bases = [name for name, card in cards.items() if card.get("parent") is None]
            lengths = {name: int(card.get("max_model_len") or 0) or None for name, card in cards.items()}
        except _MISFITS as error:
            raise EngineUnsupportedError(f"asking the teacher at {self.url}: it lists no models. {_HOW}") from error
        self.model = model or ("policy" if "policy" in cards else bases[0] if len(bases) == 1 else "")
        if self.model not in cards:
            raise ConfigConflictError(
                f"asking the teacher at {self.url}: teacher_model={self.model!r} is not there; there are "
                f"{', '.join(cards)}. Name one of them."
            )
        self.max_length = lengths[self.model]

    def digest(self) -> str:
        """Of the base and of the adapter that a server of ours serves at this moment; empty of any other, or one that
        is away."""
        try:
            answer = self._client.get("/qlora/v1/state")
            about = parse_object(answer.content) if START in answer.headers and answer.status_code == 200 else {}
        except (httpx.RequestError, ValueError):  # what is asked next says it with patience
            return ""
        digests = [about.get("base"), about.get("digest") if self.model == "policy" else ""]
        return "+".join(digest[:32] for digest in digests if digest and isinstance(digest, str))

    def read(self, text: str) -> tuple[list[int], list[float]]:
        """The tokens of a text but for the first, by the server's own tokenizer, and their finite logprobs.

        Raises:
            Exception: as `score`.
        """
        named = "the text that tokenizers are compared by"
        (places,) = self._request([text], 0, named)
        said = [self._said(place, f"{named}, token {at}") for at, place in enumerate(places[1:], 1)]
        own = [next(iter(each.items())) for each in said]
        return [token for token, _ in own], [max(logprob, _MINUS_INFINITY) for _, logprob in own]

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int], top_k: int) -> list[list[Candidates]]:
        """For each sequence, for each token from its start on: this one and the `top_k` likeliest.

        Args:
            sequences: token ids of prompt and completion.
            starts: where the completions begin.

        Raises:
            PromptTooLongError: names each row that the server has no room for; nothing was asked.
            EngineBrokenError: it stayed away, or what it says is incomplete or no logprob; names row and token.
            ConfigConflictError: it rejects the request.
        """
        limit = self.max_length or math.inf
        if long := [f"row {i} has {len(s)} tokens" for i, s in enumerate(sequences) if len(s) + 1 > limit]:
            doing = f"asking the teacher at {self.url}, which has room for {limit} tokens and must add one"
            way = ". Start it with a larger --max-model-length, or shorten prompts or max_completion_length"
            raise collected(doing, [*long[:-1], long[-1] + way], PromptTooLongError)
        found: list[list[Candidates]] = []
        for rows in _groups([len(sequence) for sequence in sequences]):
            named = f"rows {rows[0]} to {rows[-1]} of {len(sequences)}"
            answers = self._request([list(sequences[row]) for row in rows], top_k, named)
            for row, places in zip(rows, answers, strict=True):
                whole = sequences[row]
                if len(places) != len(whole):
                    self._reject(f"row {row}: {len(places)} places of {len(whole)} came back")
                found.append(
                    [
                        self._candidates(places[at], whole[at], top_k, f"row {row}, token {at} ({whole[at]})")
                        for at in range(starts[row], len(whole))
                    ]
                )
        return found

    def answer(self, prompt: Sequence[int], tokens: int, **sampling: Any) -> list[int]:
        """Tokens that the model samples after a prompt, at most so many; one that ends it is the last.

        Args:
            prompt: token ids.
            sampling: fields of /v1/completions, such as `temperature`, `top_p`, `seed`, `stop_token_ids`. Penalties
                and filters that are left out are off, whatever the model's generation_config.json says.

        Raises:
            EngineBrokenError: it stayed away.
            ConfigConflictError: it rejects the request.
            EngineUnsupportedError: it does not say which tokens it has sampled.
        """
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": tokens, "return_token_ids": True}
        body |= _PLAIN | sampling
        try:
            (choice,) = self._ask("POST", "/v1/completions", body)["choices"]
            return [int(token) for token in choice["token_ids"]]
        except _MISFITS as error:
            raise EngineUnsupportedError(
                f"asking the teacher at {self.url}: it does not say which tokens it samples. {_HOW}"
            ) from error

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._client.close()

    def _said(self, place: Any, named: str) -> dict[int, float]:
        """Of one place the tokens that are named, one at least, and their logprobs."""
        try:
            said = {int(each): float(entry["logprob"]) for each, entry in place.items()}
        except _MISFITS:
            said = {}
        if not said:
            self._reject(f"{named}: {place!r:.80} holds no logprobs")
        if wrong := [value for value in said.values() if not value <= _TOO_MUCH]:
            self._reject(f"{named}: its logprob is {wrong[0]}")
        if (total := math.fsum(map(math.exp, said.values()))) > 1 + _TOO_MUCH:
            self._reject(f"{named}: probabilities add up to {total:.4f}; are they logprobs at temperature 1?")
        return {token: -math.inf if value <= _MINUS_INFINITY else value for token, value in said.items()}

    def _candidates(self, place: Any, token: int, top_k: int, named: str) -> Candidates:
        said = self._said(place, named)
        if token not in said or len(said) < top_k:
            self._reject(f"{named}: {len(said)} logprobs came back, and {top_k} likeliest and its own were asked for")
        others = sorted((item for item in said.items() if item[0] != token), key=lambda item: -item[1])
        return [(token, said[token]), *others[:top_k]]

    def _reject(self, what: str) -> NoReturn:
        raise EngineBrokenError(
            f"asking the teacher at {self.url}, {what}. Its log may say more; when it answers again, resume the run "
            "from its last checkpoint (existing_run='resume')."
        )

    def _request(self, prompts: Sequence[Any], top_k: int, named: str) -> list[list[Any]]:
        """What is said of each place of each prompt: a table by token id, nothing of the first."""
        body = {"model": self.model, "prompt": prompts, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
        try:
            found = self._ask("POST", "/v1/completions", body)
        except EngineBrokenError as error:
            raise EngineBrokenError(
                f"asking the teacher for {named}: {error} What was trained is in the last checkpoint: start the "
                "teacher, and resume the run (existing_run='resume')."
            ) from error
        try:
            choices = {choice["index"]: choice.get("prompt_logprobs") for choice in found["choices"]}
            count = len(found["choices"])
        except _MISFITS:
            choices, count = {}, 0
        if count != len(prompts) or choices.keys() != set(range(count)):
            self._reject(f"{named}: {len(choices)} answers to {len(prompts)} prompts")
        places = [choices[at] for at in range(count)]
        if not all(isinstance(each, list) for each in places):
            raise EngineUnsupportedError(
                f"asking the teacher at {self.url}, {named}: it gives no prompt_logprobs. {_HOW}"
            )
        return places

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        patience = Patience(self.url, self.wait_s)
        while True:
            try:
                answer = self._client.request(method, path, json=body)
            except httpx.RequestError as error:
                fault = AwayError(str(error) or type(error).__name__)
            else:
                if answer.status_code == 200:
                    return self._content(answer)
                self._reject_status(answer)
                error_of = rejection(answer, self.url)
                if not isinstance(error_of, AwayError):
                    raise error_of
                fault = error_of
            patience.wait(fault, 0)
            self.outages += 1

    def _content(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            return parse_object(answer.content)
        except ValueError as error:
            raise EngineUnsupportedError(f"asking the teacher at {self.url}: {error}. {_HOW}") from error

    def _reject_status(self, answer: httpx.Response) -> None:
        status, doing = answer.status_code, f"asking the teacher at {self.url}: status={answer.status_code}"
        if status in (401, 403):
            raise AccessDeniedError(
                f"{doing}: the key is missing or wrong. Pass teacher_key_file= (in a file [teacher] api_key_file)."
            )
        if status in (400, 404, 422):
            raise ConfigConflictError(
                f"{doing} ({said_in(answer)[1]}). More likeliest tokens than it gives? Lower teacher_top_k, or start "
                f"it with --max-logprobs. Another model than {self.model!r}, or no such server? {_HOW}"
            )


_HOW = "A teacher is a server of `qlora-rl serve BASE`, or vLLM's own; give its URL without a path."


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows that are asked for together, in order."""
    rows: list[int] = []
    for row, length in enumerate(lengths):
        if rows and sum(lengths[each] for each in rows) + length > _TOKENS:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
