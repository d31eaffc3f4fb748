"""The RPC layer: how small messages reach the other side. A `Channel` has three methods, an `RPCLayer` two.

A layer holds settings only until a side opens its end: it can be pickled and handed to the other process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Protocol

from qlora_rl.errors import AccessDeniedError

logger = logging.getLogger(__name__)

PARTIAL_S = 60.0  # for the rest of a message that has begun to arrive
HANDSHAKE_S = 10.0  # for whoever has connected to show that it has the key
STRANGERS = 64  # that may be connected at once and have not


class Channel(Protocol):
    """One end of a way for messages."""

    def send(self, message: bytes, timeout_s: float) -> None:
        """Hand a message over; OSError (ConnectionError, TimeoutError) where the other side is gone."""
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message, or `None` after that many seconds; OSError where the other side is gone."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class RPCLayer(Protocol):
    """Opens both ends."""

    def connect(self, timeout_s: float) -> Channel:
        """The sender's end; OSError where no receiver is there in time. May be called again when a channel has
        failed."""
        ...

    def listen(self) -> Channel:
        """The receiver's end; outlives senders that come and go."""
        ...


class InProcessRPC:
    """Both sides in one process, in two threads, or in one: then a sender that waits takes the receiver's turn."""

    def __init__(self) -> None:
        self.to_sender: queue.Queue[bytes] = queue.Queue()
        self.to_receiver: queue.Queue[bytes] = queue.Queue()
        self.turn: Callable[[], None] | None = None

    def connect(self, timeout_s: float) -> Channel:
        """The sender's end."""
        deadline = time.monotonic() + timeout_s
        while self.turn is None:
            if time.monotonic() > deadline:
                raise TimeoutError("no receiver listens in this process")
            time.sleep(0.001)
        return _Queues(self.to_receiver, self.to_sender, lambda: self.turn and self.turn())

    def listen(self) -> Channel:
        """The receiver's end."""
        return _Queues(self.to_sender, self.to_receiver, None)

    def serve_in_turn(self, turn: Callable[[], None] | None) -> None:
        """`turn` serves what was sent, called in the sender's thread while it waits; `None` when the receiver
        leaves."""
        self.turn = turn


class _Queues:
    def __init__(self, out: queue.Queue[bytes], into: queue.Queue[bytes], turn: Callable[[], object] | None):
        self._out, self._in, self._turn = out, into, turn

    def send(self, message: bytes, timeout_s: float) -> None:
        self._out.put(message)

    def receive(self, timeout_s: float) -> bytes | None:
        if self._turn is not None and self._in.empty():
            self._turn()
        try:
            return self._in.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        pass


class MultiprocessingRPC:
    """Two processes of one host over `multiprocessing.connection`; the receiver listens, senders come and go.

    Messages are bytes: nothing is unpickled. Make it once and hand it to both processes, or give both the same
    arguments.

    Args:
        address: a path of a socket, or (host, port); by default a path in a new directory that only this user can
            enter.
        authkey: both sides authenticate with it; by default a random one.
    """

    def __init__(self, address: str | tuple[str, int] | None = None, authkey: bytes | None = None):
        self._own_place = tempfile.mkdtemp(prefix="qlora-rl-rpc-") if address is None else None
        self.address = os.path.join(self._own_place, "socket") if address is None else address
        self.authkey = authkey or secrets.token_bytes(32)

    def connect(self, timeout_s: float) -> Channel:
        """The sender's end; waits for a receiver."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.01, deadline - time.monotonic())
            try:
                return _Connected(_admitted(_dial(self.address, left), self.authkey, left, is_asked_first=True))
            except (AuthenticationError, AssertionError) as error:  # the latter of what does not begin as it should
                raise AccessDeniedError(
                    f"connecting to {self.address}: there is no receiver, or it has another authkey. Give both sides "
                    "one: authkey=."
                ) from error
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"no receiver listens at {self.address}: {error or type(error).__name__}"
                    ) from error
            time.sleep(0.01)

    def listen(self) -> Channel:
        """The receiver's end."""
        if self._own_place is not None:
            os.makedirs(self._own_place, mode=0o700, exist_ok=True)
        if isinstance(self.address, str):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)  # of a receiver that was killed
        return _Listening(Listener(self.address), self.authkey, self._tidy)

    def _tidy(self) -> None:
        if self._own_place is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._own_place)


def _dial(address: str | tuple[str, int], timeout_s: float) -> Connection:
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as handle:
        handle.settimeout(timeout_s)
        handle.connect(address)
        handle.settimeout(None)
        return Connection(handle.detach())


def _admitted(connection: Connection, key: bytes, timeout_s: float, *, is_asked_first: bool = False) -> Connection:
    """The connection, once both sides have shown that they have the key; closed where they have not, or not in time."""
    with socket.socket(fileno=os.dup(connection.fileno())) as handle:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # it has left
                handle.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(timeout_s, hang_up)
        timer.start()
        try:
            steps = (deliver_challenge, answer_challenge)
            for step in reversed(steps) if is_asked_first else steps:
                step(connection, key)
        except BaseException:
            connection.close()
            raise
        finally:
            timer.cancel()
            timer.join()  # it must not shut down what is admitted
    return connection


class _Connected:
    def __init__(self, connection: Connection):
        self._connection = connection
        self._limit(socket.SO_RCVTIMEO, PARTIAL_S)

    def send(self, message: bytes, timeout_s: float) -> None:
        # The kernel takes a socket's bytes only as fast as the other side reads them: a silent one must not hold us for
        # ever.
        self._limit(socket.SO_SNDTIMEO, timeout_s)
        self._connection.send_bytes(message)

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            return self._connection.recv_bytes() if self._connection.poll(timeout_s) else None
        except EOFError as error:
            raise ConnectionResetError("it has closed the connection") from error

    def close(self) -> None:
        self._connection.close()

    def _limit(self, option: int, seconds: float) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as handle:
            handle.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


class _Listening:
    """Accepts one sender after another; the newest one counts. Whoever does not show the key keeps nobody waiting."""

    def __init__(self, listener: Listener, key: bytes, tidy: Callable[[], None]):
        self._listener, self._key, self._tidy = listener, key, tidy
        self._is_closed = False
        self._unknown = threading.Semaphore(STRANGERS)
        self._new: queue.Queue[_Connected] = queue.Queue()
        self._current: _Connected | None = None
        self._thread = threading.Thread(target=self._accept, daemon=True, name="qlora-rl-rpc")
        self._thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except OSError as error:  # it left, or this process has no descriptor left
                logger.info("accepting a sender: %s", error)
                time.sleep(0.1)
                continue
            if self._is_closed:
                connection.close()
            elif self._unknown.acquire(timeout=HANDSHAKE_S):
                threading.Thread(target=self._admit, args=(connection,), daemon=True, name="qlora-rl-rpc").start()

    def _admit(self, connection: Connection) -> None:
        try:
            self._new.put(_Connected(_admitted(connection, self._key, HANDSHAKE_S)))
        except (OSError, EOFError, AuthenticationError, AssertionError) as error:
            logger.info("a connection was closed: %s", error or type(error).__name__)
        finally:
            self._unknown.release()

    def send(self, message: bytes, timeout_s: float) -> None:
        if self._current is None:
            raise ConnectionResetError("no sender is connected")
        self._current.send(message, timeout_s)

    def receive(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(queue.Empty):
                newest = self._new.get(timeout=0 if self._current else max(0.0, deadline - time.monotonic()))
                self._hang_up()
                self._current = newest
            if self._current is None:
                return None
            left = deadline - time.monotonic()
            try:
                message = self._current.receive(max(0.0, min(left, 0.1)))
            except OSError:
                self._hang_up()
                raise
            if message is not None or left <= 0:
                return message

    def _hang_up(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None

    def close(self) -> None:
        self._hang_up()
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):
                _dial(self._listener.address, 1.0).close()  # closing a socket does not end the thread that accepts
            self._thread.join(1.0)
            self._listener.close()
            self._tidy()
