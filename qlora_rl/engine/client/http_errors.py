"""What an answer of a server that is none stands for: one error for each status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import httpx

from qlora_rl import errors
from qlora_rl.documents import parse_object
from qlora_rl.errors import (
    AccessDeniedError,
    BaseMismatchError,
    EngineBrokenError,
    EngineUnsupportedError,
    QloraRLError,
    ServerTakenError,
    SyncError,
)

logger = logging.getLogger(__name__)

KEY_VARIABLE = "QLORA_RL_API_KEY"
START, GAVE_UP = "x-qlora-start", "x-qlora-gave-up"
SAID_EVERY_S = 10.0  # that a server is away
# How often vLLM may give a request up: once or twice while it ends; one that goes on answering does not end.
GIVEN_UP_AT_MOST = 5
RESTARTED = 412
# What a proxy in front of a server answers while the server is away.
_AWAY = (502, 503, 504)


class AwayError(Exception):
    """Nobody answers, or a proxy says so; with `gave_up` the server does, of a request that vLLM has given up."""

    gave_up = False


class Patience:
    """How long one request is repeated.

    Args:
        url: of the server.
        wait_s: how long it may be away, in seconds.
    """

    def __init__(self, url: str, wait_s: float):
        self._url, self._wait_s = url, wait_s
        self._end, self._pause, self._said = time.monotonic() + wait_s, 0.1, -SAID_EVERY_S
        self._given_up = 0

    def wait(self, fault: AwayError, version: int) -> None:
        """Sleep before it is asked again, longer each time.

        Raises:
            EngineBrokenError: it was away too long, or gives this request up again and again.
        """
        self._given_up += fault.gave_up
        if self._given_up >= GIVEN_UP_AT_MOST:
            raise EngineBrokenError(
                f"asking the server at {self._url}: {fault}, {self._given_up} times in turn, and goes on. Its log may "
                "say why; ask for fewer or shorter completions at a time, or start it again."
            )
        now = time.monotonic()
        if now + self._pause > self._end:
            way = f"Start it again on the same base, or raise wait_s; version {version} is pushed again by itself."
            raise EngineBrokenError(
                f"asking the server at {self._url}: {fault}. It stayed away for wait_s={self._wait_s:.0f} s. "
                + (way if version else "Start it (qlora-rl serve BASE), or correct its address.")
            ) from fault.__cause__
        if now >= self._said + SAID_EVERY_S:
            self._said = now
            logger.warning("the server at %s is away (%s); trying again for %.0f s", self._url, fault, self._end - now)
        time.sleep(self._pause)
        self._pause = min(5.0, 2 * self._pause)


class RestartedError(Exception):
    """Somebody answers who was started later than whom was `asked`."""

    def __init__(self, start: str, asked: str):
        super().__init__(start)
        self.start, self.asked = start, asked


def content_of(answer: httpx.Response, url: str, known: str) -> dict[str, Any]:
    """What a server of ours says.

    Args:
        answer: to a request.
        url: that was asked.
        known: name of the server's start that the request named.

    Raises:
        RestartedError: it was restarted since.
        Exception: `rejection`, `stranger`.
    """
    start = answer.headers.get(START, "")
    if answer.status_code == RESTARTED:
        raise RestartedError(start, known)
    if answer.status_code != 200:
        raise rejection(answer, url)
    try:
        found = answer.json()
    except ValueError as error:
        raise stranger(url) from error
    if not start or not isinstance(found, dict):
        raise stranger(url)
    return found


def said_in(answer: httpx.Response) -> tuple[Any, str, list[str]]:
    """Of an answer that is none: the error's class where it is one of ours, what it says, and all reasons."""
    try:
        error = parse_object(answer.content)["error"]
        reasons = [str(reason) for reason in error.get("reasons", ())]
        return getattr(errors, str(error.get("kind")), None), str(error["message"]), reasons
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, answer.text.strip()[:200], []


def rejection(answer: httpx.Response, url: str) -> Exception:
    """The error that a status stands for."""
    status = answer.status_code
    kind, message, reasons = said_in(answer)
    if isinstance(kind, type) and issubclass(kind, QloraRLError):
        if kind is AccessDeniedError and status == 401:
            message = (
                f"asking the server at {url}: the key is missing or wrong. Pass api_key_file= ([rollout] api_key_file "
                f"in a run's file), or set {KEY_VARIABLE}."
            )
        return kind(message, reasons=reasons)
    if status in _AWAY:
        away = AwayError(f"status={status} ({message})")
        away.gave_up = GAVE_UP in answer.headers
        return away
    if status in (401, 403):
        return AccessDeniedError(f"asking the server at {url}: status={status} ({message}). Is the key right?")
    if status == 404:
        return stranger(url)
    return EngineBrokenError(f"asking the server at {url}: status={status} ({message}). Its log says more.")


def says_lost(answer: httpx.Response) -> bool:
    """A server of ours answers that what it holds may not serve."""
    if answer.status_code != 503 or START not in answer.headers:
        return False
    return isinstance(rejection(answer, ""), EngineBrokenError)


def reject_other_version(asked: object, found: dict[str, Any], is_own: Callable[[int], bool]) -> None:
    """Raise `ServerTakenError` where an answer is by another version than the question named; unless it had only named
    what served, and one that this client has pushed meanwhile (`is_own`) has answered."""
    named = asked if isinstance(asked, dict) else {}
    wanted = named.get("version")
    if wanted is None or (by := found.get("version", wanted)) == wanted:
        return
    if named.get("held") or not is_own(by):
        raise ServerTakenError(
            f"generating: version={wanted} was asked for, and version={by} has answered: somebody else has "
            "pushed. One engine serves one trainer; start another one."
        )


def stranger(url: str) -> EngineUnsupportedError:
    """Somebody else is at this URL."""
    return EngineUnsupportedError(
        f"asking the server at {url}: what answers is no server of qlora_rl. Start it with `qlora-rl serve BASE`, and "
        "give its own URL, without a path."
    )


def other_base(url: str, found: str, before: str) -> BaseMismatchError:
    """A server that was restarted holds another base; both by digest."""
    return BaseMismatchError(
        f"asking {url}: it was restarted on another base: digest={found[:16]} != digest={before[:16]} of "
        "the one before. Start it on the base directory that the trainer uses."
    )


def not_taken(what: str, version: int, serves: int) -> SyncError:
    """A push was answered, and another version serves."""
    return SyncError(f"pushing {what} version={version}: the engine answers with version={serves}. Push again.")
