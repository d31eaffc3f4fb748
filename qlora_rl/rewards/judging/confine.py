"""What the kernel takes from a process, without root: files and other processes out of sight, memory, time, privileges,
system calls."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Sequence

from .calls import filter_calls

# A standard library needs these in addition to what is in `sys.path`.
_READABLE = (
    "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache",
    "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip
_STACK = 2 * 2**20  # bytes
_NEWUSER, _NEWNS = 0x10000000, 0x00020000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV = 0x1000, 0x4000, 0x40000, 0x2, 0x4
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of Landlock, on every architecture
_EXECUTE, _READ_FILE, _READ_DIR, _ALL_ACCESS = 1 << 0, 1 << 2, 1 << 3, (1 << 13) - 1  # those of its first version


def readable() -> list[str]:
    """What a program may read: Python's standard library, the libraries of the system, four devices."""
    paths = {*sys.path, os.path.join(sys.base_prefix, "lib"), *_READABLE}
    return sorted(
        (each for each in paths if os.path.isabs(each) and os.path.exists(each)), key=len
    )  # what holds others first


def enter_namespace(root: str) -> None:
    """Into a user namespace, whose file system is `readable` alone, mounted at `root`, and an empty directory to be in.

    Raises:
        OSError: this kernel or its administrator does not let users make namespaces.
    """
    uid, gid = os.geteuid(), os.getegid()
    paths = readable()
    _libc("unshare", _NEWUSER | _NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV)
    for path in paths:
        _show(path, root)
    for path in _packages():
        _mount("tmpfs", root + path, "tmpfs", _NOSUID | _NODEV)
    os.mkdir(f"{root}/empty")
    os.chroot(root)
    os.chdir("/empty")


def _packages() -> list[str]:
    """Directories of packages among what is readable: where there is no virtual environment, packages are installed in
    the library's own directory."""
    library = os.path.dirname(os.__file__)
    some = [
        os.path.join(place, f"{name}-packages") for place in (library, "/usr/lib/python3") for name in ("site", "dist")
    ]
    return [each for each in some if os.path.isdir(each)]


def has_landlock() -> bool:
    """Whether the kernel restricts files by path, where a process asks for it."""
    return _library().syscall(_CREATE_RULESET, None, ctypes.c_long(0), ctypes.c_long(1)) > 0  # the version of it


def confine(*, supervisor: int, seconds: float, nbytes: int, landlock: bool) -> None:
    """This process, before it runs anything: for good.

    Raises:
        OSError: something of it cannot be had.
    """
    # Threads take little of the memory: one pool of it for all (M_ARENA_MAX), and a small stack each.
    _libc("mallopt", -8, 1)
    threading.stack_size(_STACK)
    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_AS: nbytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for name, value in limits.items():
        highest = resource.getrlimit(name)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(name, (value, value))
    _libc("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if landlock:
        _see_only([*readable(), os.getcwd()])
    # No capabilities. A process of root's without them does not see into those that have them.
    _libc("capset", ctypes.c_char_p(struct.pack("Ii", 0x20080522, 0)), ctypes.c_char_p(bytes(24)))
    end_with(supervisor)
    filter_calls()


def hide_memory() -> None:
    """From other processes of this user: neither this process nor those that it forks can be looked into."""
    _libc("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def end_with(parent: int) -> None:
    """This process is killed when its parent ends."""
    _libc("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _show(path: str, root: str) -> None:
    target = root + path
    if os.path.lexists(target):  # a part of what is shown already
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and not os.path.isabs(os.readlink(path)):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        with open(target, "w"):
            pass
    _mount(path, target, None, _BIND | _REC)


def _see_only(paths: Sequence[str]) -> None:
    ruleset = _libc("syscall", _CREATE_RULESET, ctypes.c_char_p(struct.pack("Q", _ALL_ACCESS)), 8, 0)
    for path in paths:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = _READ_FILE | ((_READ_DIR | _EXECUTE) if os.path.isdir(path) else 0)
        _libc("syscall", _ADD_RULE, ruleset, 1, ctypes.c_char_p(struct.pack("=Qi", access, place)), 0)
        os.close(place)
    _libc("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    _libc("mount", source.encode(), target.encode(), kind and kind.encode(), flags, None)


def _libc(name: str, *arguments: object) -> int:
    whole = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(getattr(_library(), name)(*whole))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
