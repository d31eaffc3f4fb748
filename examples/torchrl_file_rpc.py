"""An RPC layer of one's own for `qlora_rl.torchrl`: messages as files in a directory that both sides see. See
docs/torchrl.md.

AdapterSyncScheme(FileRPC("/shared/policy"))
"""

import itertools
import os
import pathlib
import time


class FileRPC:
    def __init__(self, directory):
        self.directory = pathlib.Path(directory)

    def connect(self, timeout_s):
        return FileChannel(self.directory / "to_receiver", self.directory / "to_sender")

    def listen(self):
        return FileChannel(self.directory / "to_sender", self.directory / "to_receiver")


class FileChannel:
    def __init__(self, out, into):
        self.out, self.into, self.numbers = out, into, itertools.count()
        for place in (out, into):
            place.mkdir(parents=True, exist_ok=True)

    def send(self, message, timeout_s):
        name = f"{time.time_ns():020d}-{next(self.numbers):06d}"
        (self.out / f".{name}").write_bytes(message)
        os.rename(self.out / f".{name}", self.out / name)  # a message appears whole

    def receive(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while True:
            whole = sorted(path for path in self.into.iterdir() if not path.name.startswith("."))
            if whole:
                message = whole[0].read_bytes()
                whole[0].unlink()
                return message
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.005)

    def close(self):
        pass
