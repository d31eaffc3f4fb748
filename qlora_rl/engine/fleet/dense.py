"""`Broadcast`: full weights, made once, to all replicas of a fleet; `Kept`: those of the version that serves, for one
that is taken back."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from qlora_rl.engine.chunks import Part, send_all
from qlora_rl.engine.client import EngineClient
from qlora_rl.engine.client.upload import WeightsPush
from qlora_rl.engine.fleet.replicas import Replicas
from qlora_rl.engine.staging import part_name
from qlora_rl.errors import EngineBrokenError, QloraRLError, SyncError
from qlora_rl.locks import let_go, new_directory

# What the headers of all parts may take, in bytes.
_HEADERS_BYTES = 16 * 2**20


class Kept:
    """The parts of one version on this machine's disk, in the directory for temporary files (TMPDIR).

    Args:
        version: of the weights.
    """

    def __init__(self, version: int):
        self.version = version
        self._directory = new_directory(Path(tempfile.gettempdir()), "qlora-rl-kept-")
        self._digests: list[str] = []

    @staticmethod
    def has_room(nbytes: int) -> bool:
        """For so many bytes of weights."""
        return shutil.disk_usage(tempfile.gettempdir()).free > nbytes + _HEADERS_BYTES

    def add(self, part: Part) -> None:
        """The next part.

        Raises:
            SyncError: it cannot be written.
        """
        file = self._directory / part_name(len(self._digests))
        try:
            with file.open("wb") as out:
                for piece in part.pieces:
                    out.write(piece)
        except OSError as error:
            raise SyncError(f"writing {file}: {error.strerror}. Set TMPDIR to a directory with more room.") from error
        self._digests.append(part.digest)

    def replay(self, each: EngineClient) -> None:
        """Have a replica serve this version.

        Raises:
            SyncError: a part has changed on the disk, or the replica rejected it.
        """
        push = each.begin_dense(self.version)
        try:
            for i, digest in enumerate(self._digests):
                file = self._directory / part_name(i)
                try:
                    part = Part.of(file.read_bytes())
                except OSError as error:
                    raise SyncError(f"reading {file}: {error.strerror}. Push again.") from error
                if part.digest != digest:
                    raise SyncError(f"reading {file}: it was changed since it was written. Push again.")
                push.send(part)
        except BaseException:
            push.abandon()
            raise
        push.commit()

    def discard(self) -> None:
        """Remove it; harmless when repeated."""
        let_go(self._directory)
        shutil.rmtree(self._directory, ignore_errors=True)


class Broadcast:
    """One push to several replicas: every part is made once and sent to all at the same time; then all load what they
    have.

    A replica that is lost on the way is dropped, and the others go on.

    Args:
        team: of the replicas.
        version: that the weights get.
    """

    def __init__(self, team: Replicas, version: int):
        self._team, self.version = team, version
        self.kept: Kept | None = None
        self._pushes: dict[EngineClient, WeightsPush] = {}
        self._starts: dict[EngineClient, int] = {}

    def stream(
        self,
        replicas: Sequence[EngineClient],
        weights: Iterable[tuple[str, torch.Tensor]],
        make_room: Callable[[], None],
    ) -> int:
        """Bring all parts to all of them; nothing is loaded yet.

        Args:
            replicas: that take part.
            weights: by transformers' name; read once.
            make_room: lets go of what is kept of the version before; called where there is no room for both.

        Returns:
            Bytes of the weights.

        Raises:
            SyncError: they could not be made, or did not arrive; what served goes on serving everywhere.
        """
        try:
            self._ask(replicas, self._begin)
            nbytes = max(push.nbytes for push in self._pushes.values())
            if not Kept.has_room(nbytes):
                make_room()
            if not Kept.has_room(nbytes):
                raise SyncError(
                    f"pushing weights version={self.version}: {nbytes / 2**20:.0f} MiB are needed at "
                    f"{tempfile.gettempdir()}, where they are kept for a replica that is lost and comes back. Set "
                    "TMPDIR to a directory with more room."
                )
            self.kept = Kept(self.version)
        except BaseException:
            self.abandon()
            raise
        return send_all(weights, self.version, self._send, self.abandon)

    def commit(self) -> None:
        """Have all that hold all parts load them, at the same time.

        Raises:
            SyncError: one could not, or none is left; the others may serve this version already.
        """
        self._ask(list(self._pushes), lambda each: self._pushes[each].commit())

    def abandon(self) -> None:
        """Throw away what was sent, and what is kept of it."""
        for each, push in list(self._pushes.items()):
            if self._team.takes_part(each):
                with contextlib.suppress(QloraRLError):
                    push.abandon()
        if self.kept is not None:
            self.kept.discard()

    def _begin(self, each: EngineClient) -> None:
        self._pushes[each] = each.begin_dense(self.version)
        self._starts[each] = each.incarnation

    def _send(self, part: Part) -> None:
        self.kept.add(part)  # makes its pieces and its digest in this thread, not in each of theirs
        self._ask(list(self._pushes), lambda each: self._pushes[each].send(part))

    def _ask(self, replicas: Sequence[EngineClient], ask: Callable[[EngineClient], None]) -> None:
        """All of them at once; those that were lost in it are left out from now on."""

        def asked(each: EngineClient) -> None:
            try:
                ask(each)
            except SyncError as error:
                if each.incarnation == self._starts.get(each, each.incarnation):
                    raise
                text = f"pushing weights version={self.version}: {each.url} was restarted in the middle."
                raise EngineBrokenError(text) from error

        answers = self._team.ask(replicas, asked, watches=True)
        for each in set(self._pushes) - set(answers):
            del self._pushes[each]
        if not answers:
            raise SyncError("all replicas were lost in the middle")
