"""Every error that qlora_rl raises on purpose.

::

    QloraRLError
    ├── MissingDependencyError   (ImportError)          a package is missing or too old; names what to install
    ├── NotYetSupportedError     (NotImplementedError)  a known wish that this version cannot meet; names what can
    ├── UnsupportedQuantError    (ValueError)           a quantisation that trainer and engine cannot share
    ├── BaseIncompleteError      (ValueError)           a base directory that is half written or was changed
    ├── BaseMismatchError        (ValueError)           trainer and engine hold different bases
    ├── ConfigConflictError      (ValueError)           arguments that contradict each other or this project
    ├── MemoryBudgetError        (ValueError)           a run that cannot fit into the memory it may use
    ├── AdapterRejectedError     (ValueError)           an adapter that cannot be served as asked
    ├── EngineUnsupportedError   (ValueError)           a model or setting that the engine cannot run
    ├── PromptTooLongError       (ValueError)           a prompt that leaves no room for a completion
    ├── EngineBrokenError        (RuntimeError)         the engine failed in the middle of its work
    ├── RolloutCancelledError    (RuntimeError)         a rollout was ended from another thread, because its run ends
    ├── VersionGoneError         (LookupError)          the engine no longer holds the version that is asked for
    ├── EngineClosedError        (RuntimeError)         the engine was used after `close()`
    ├── AccessDeniedError        (PermissionError)      a server was asked without its key, or for what it does not give
    ├── ServerTakenError         (RuntimeError)         another trainer holds the server
    ├── EngineBusyError          (RuntimeError)         the engine was to be closed while a model borrows its base
    ├── CannotShareError         (ValueError)           trainer and engine cannot hold one copy of the base
    ├── SyncError                (RuntimeError)         a push failed; the version before it still serves
    ├── PeerLostError            (ConnectionError)      the other process of a weight sync is gone or silent
    ├── RankLostError            (ConnectionError)      a process of a training by several is gone or silent
    ├── CanaryError              (RuntimeError)         the engine does not multiply with what was pushed
    ├── PolicyMismatchError      (RuntimeError)         rollouts were sampled from something else than the policy
    ├── ExportError              (RuntimeError)         an export that, loaded again, is not the policy
    ├── RewardFunctionError      (ValueError)           a reward function raised or returned nonsense
    └── RunDirectoryError        (OSError)              a run directory that is taken, or a disk that is full

A message reads: what was being done, with which values, at which module, and what to do instead. Where several
things are wrong they are all collected in `reasons` and raised once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class QloraRLError(Exception):
    """Base of all errors of this package.

    Attributes:
        reasons: every single thing that was wrong, one sentence each (at least one).
        module: dotted name of the module of the model that is concerned, if there is one.
    """

    def __init__(self, message: str, *, reasons: Sequence[str] = (), module: str | None = None):
        super().__init__(message)
        self.reasons: tuple[str, ...] = tuple(reasons) or (message,)
        self.module = module

    def __str__(self) -> str:
        return str(self.args[0])


class MissingDependencyError(QloraRLError, ImportError):
    """A package is missing, too old or too new; the message names what to install."""


class NotYetSupportedError(QloraRLError, NotImplementedError):
    """A reasonable wish that this version cannot meet; the message names what can be done instead."""


class UnsupportedQuantError(QloraRLError, ValueError):
    """A quantisation that the trainer and the engine cannot both hold bit for bit."""


class BaseIncompleteError(QloraRLError, ValueError):
    """A base directory is half written, damaged, or was changed after it was prepared."""


class BaseMismatchError(QloraRLError, ValueError):
    """Trainer and engine hold different bases; names the first weight that differs, and how many more there are."""


class ConfigConflictError(QloraRLError, ValueError):
    """Arguments contradict each other, or ask for what this project does not do."""


class MemoryBudgetError(QloraRLError, ValueError):
    """A run needs more memory than it may use; names the numbers, and what to lower by how much."""


class AdapterRejectedError(QloraRLError, ValueError):
    """The adapter cannot be served in the way that was asked for."""


class EngineUnsupportedError(QloraRLError, ValueError):
    """The engine cannot run this model or this setting."""


class PromptTooLongError(QloraRLError, ValueError):
    """A prompt leaves no room for a completion within the engine's maximum length."""


class EngineBrokenError(QloraRLError, RuntimeError):
    """The engine failed in the middle of its work; it is rebuilt at its next use."""


class RolloutCancelledError(QloraRLError, RuntimeError):
    """A rollout was ended from another thread, because the run that wanted it ends."""


class VersionGoneError(QloraRLError, LookupError):
    """The engine no longer holds the version of the policy that is asked for."""


class EngineClosedError(QloraRLError, RuntimeError):
    """The engine was used after it had been closed."""


class AccessDeniedError(QloraRLError, PermissionError):
    """A server was asked without its key, with a wrong one, or for a file outside its adapter directory."""


class ServerTakenError(QloraRLError, RuntimeError):
    """Another trainer pushes to this server; one server serves one policy."""


class EngineBusyError(QloraRLError, RuntimeError):
    """The engine was to be closed while a living model borrows its base."""


class CannotShareError(QloraRLError, ValueError):
    """The engine's tensors cannot be the trainer's; says why. Two copies (`load_base`) always work."""


class SyncError(QloraRLError, RuntimeError):
    """A push failed; the version before it still serves."""


class PeerLostError(QloraRLError, ConnectionError):
    """The other process of a weight sync is gone, or has been silent for longer than its time limit.

    Attributes:
        stage: what was being done: "join", "begin", "transfer", "apply", `"prove"`, "commit" or "end".
    """

    stage: str = ""


class RankLostError(QloraRLError, ConnectionError):
    """A process of a training by several was killed, or has been silent for longer than its time limit.

    Attributes:
        ranks: which.
    """

    ranks: tuple[int, ...] = ()


class CanaryError(QloraRLError, RuntimeError):
    """After a push, the engine does not hold or does not apply what was pushed; the version before it serves again."""


class PolicyMismatchError(QloraRLError, RuntimeError):
    """Rollouts were, or would be, sampled from something else than the trainer's policy.

    Attributes:
        cause: "scale", "stale", "layer", "bare", "adapter", "base", "sampling", "function", "dtype", "nan" or
            "unknown".
    """

    cause: str = "unknown"


class ExportError(QloraRLError, RuntimeError):
    """What was exported, loaded again, is too far from the policy that was trained, or reads texts otherwise; nothing
    was left."""


class RewardFunctionError(QloraRLError, ValueError):
    """A reward function raised, or returned something that is not one number per completion."""


class RunDirectoryError(QloraRLError, OSError):
    """The run directory holds another run, or cannot be written."""


def collected(doing: str, reasons: Sequence[str], kind: type[QloraRLError]) -> QloraRLError:
    """One error of type `kind` out of all `reasons` (at least one), as a list where there are several."""
    if len(reasons) == 1:
        return kind(f"{doing}: {reasons[0]}", reasons=reasons)
    lines = "".join(f"\n  - {reason}" for reason in reasons)
    return kind(f"{doing}: {len(reasons)} reasons:{lines}", reasons=reasons)


def raise_where(doing: str, found: Iterable[tuple[Any, str]], kind: type[QloraRLError] = ConfigConflictError) -> None:
    """Raise `collected` texts, of pairs of what is wrong where it is true, and its text."""
    if reasons := [text for is_wrong, text in found if is_wrong]:
        raise collected(doing, reasons, kind)
