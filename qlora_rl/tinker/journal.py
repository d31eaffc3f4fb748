"""`Journal`: what the server must still know when it was killed, in one SQLite file.

A request is in it before the client is told its number, with its body; its result is written in one transaction with
the number up to which its model's saved state holds. So whatever is killed when, each request has been applied once:
those up to that number are in the state, and those behind it are computed again from their bodies.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_rl.errors import ConfigConflictError, RunDirectoryError
from qlora_rl.locks import hold

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, owner TEXT, ended INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, rank INTEGER, metadata TEXT, state TEXT DEFAULT '',
    applied INTEGER DEFAULT -1, done INTEGER DEFAULT -1, used REAL);
CREATE TABLE IF NOT EXISTS requests (
    model TEXT, seq INTEGER, kind TEXT, body BLOB, digest TEXT, state TEXT, form TEXT, result BLOB,
    PRIMARY KEY (model, seq));
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, model TEXT, directory TEXT, path TEXT, seq INTEGER);
CREATE TABLE IF NOT EXISTS saved (
    path TEXT PRIMARY KEY, owner TEXT, model TEXT, kind TEXT, seq INTEGER, directory TEXT, size INTEGER, made REAL,
    expires REAL, metadata TEXT);
"""
Row = dict[str, Any]
# Requests of a model whose results can still be fetched; a client may fetch all of a training at its end.
_RESULTS = 8192


class Journal:
    """The tables; each method is one transaction, on disk when it returns.

    Args:
        directory: of one server at a time; made where there is none.

    Raises:
        RunDirectoryError: another server uses the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, pid = directory, directory / "pid"
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)  # also where it was there
        try:
            self._held = hold(directory, alone=True)
        except BlockingIOError as error:
            holder = pid.read_text() if pid.exists() else "unknown"
            raise RunDirectoryError(
                f"starting the server: {directory} is used by another one (process {holder}). Stop that one, or take "
                "another --dir."
            ) from error
        pid.write_text(str(os.getpid()))
        self._lock = threading.RLock()
        tables = directory / "journal.sqlite"
        tables.touch(0o600)
        self._db = sqlite3.connect(tables, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        with self._db:
            self._db.executescript(_TABLES)

    def put(self, table: str, **fields: Any) -> bool:
        """Add a row, unless there is one of its key; whether it was added."""
        names, places = ", ".join(fields), ", ".join("?" * len(fields))
        with self._lock, self._db:
            found = self._db.execute(
                f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({places})", tuple(fields.values())
            )
        return bool(found.rowcount)

    def rows(self, table: str, order: str = "rowid", **where: Any) -> list[Row]:
        """The rows with these values."""
        wanted = " AND ".join(f"{name} = ?" for name in where) or "1"
        with self._lock:
            found = self._db.execute(f"SELECT * FROM {table} WHERE {wanted} ORDER BY {order}", tuple(where.values()))
            return [dict(row) for row in found]

    def row(self, table: str, **where: Any) -> Row | None:
        """The one row with these values."""
        return next(iter(self.rows(table, **where)), None)

    def change(self, table: str, where: Mapping[str, Any], **fields: Any) -> None:
        """Give the rows with these values others."""
        with self._lock, self._db:
            self._change(table, where, fields)

    def remove(self, table: str, **where: Any) -> None:
        """Remove the rows with these values."""
        with self._lock, self._db:
            self._db.execute(
                f"DELETE FROM {table} WHERE {' AND '.join(f'{name} = ?' for name in where)}", tuple(where.values())
            )

    def noted(self, model: str, first: int, last: int) -> list[Row]:
        """Number, kind and state of a model's requests from one number to another, without bodies and results."""
        asked = "SELECT seq, kind, state FROM requests WHERE model = ? AND seq BETWEEN ? AND ? ORDER BY seq"
        with self._lock:
            return [dict(row) for row in self._db.execute(asked, (model, first, last))]

    def submit(
        self, model: str, seq: int, kind: str, body: bytes, same: bytes | None = None, late: bytes | None = None
    ) -> bool:
        """Note a request; one that is sent again is the same. Whether it is new.

        Args:
            same: by what it is known again; the body, unless something in that is new each time.
            late: what is said of it at once, where it is not to be computed.

        Raises:
            ConfigConflictError: another one had its number.
        """
        digest = hashlib.sha256(kind.encode() + (body if same is None else same)).hexdigest()
        fields: Row = {"state": "waiting", "body": body}
        if late is not None:
            fields = {"state": "void", "body": b"", "form": "failed", "result": late}
        if self.put("requests", model=model, seq=seq, kind=kind, digest=digest, **fields):
            return True
        known = self.row("requests", model=model, seq=seq)
        if known is not None and known["digest"] != digest:
            raise ConfigConflictError(
                f"taking a request: another one had seq_id={seq} of {model}. Count on from the last one."
            )
        return False

    def finish(
        self,
        model: str,
        seq: int,
        state: str,
        form: str,
        result: bytes,
        saved: str | None = None,
        *,
        is_needed: bool = False,
    ) -> None:
        """Note what came of a request; with `saved`, that the model's state up to it is in that directory.

        Args:
            state: "done"; "failed", which may have dropped gradients; or "void", which has changed nothing.
            is_needed: its body is, until a state is saved: it has changed what is in memory alone.
        """
        with self._lock, self._db:
            noted = {"state": state, "form": form, "result": result}
            noted |= {} if is_needed else {"body": b""}
            self._change("requests", {"model": model, "seq": seq}, noted)
            fields: Row = {"done": seq, "used": time.time()}
            if saved is not None:
                fields |= {"state": saved, "applied": seq}
                self._db.execute(
                    "UPDATE requests SET body = x'' WHERE model = ? AND seq <= ? "
                    "AND seq > (SELECT applied FROM models WHERE id = ?)",
                    (model, seq, model),
                )
            self._db.execute(
                "DELETE FROM requests WHERE model = ? AND seq < ? AND length(body) = 0", (model, seq - _RESULTS)
            )
            self._change("models", {"id": model}, fields)

    def close(self) -> None:
        """Close the file, and let go of the directory."""
        with self._lock:
            self._db.close()
        os.close(self._held)

    def _change(self, table: str, where: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self._db.execute(
            f"UPDATE {table} SET {', '.join(f'{name} = ?' for name in fields)} "
            f"WHERE {' AND '.join(f'{name} = ?' for name in where)}",
            (*fields.values(), *where.values()),
        )


def metadata_of(given: Mapping[str, Any] | None) -> str:
    """User metadata, as a column holds it."""
    return json.dumps({str(key): str(value) for key, value in (given or {}).items()})
