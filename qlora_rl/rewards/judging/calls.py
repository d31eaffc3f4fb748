"""The system calls that a program may make: a seccomp filter, which cannot be removed. Everything else fails with
EPERM.

Numbers are those of Linux' headers, `asm/unistd_64.h` and `asm-generic/unistd.h`. The form of a filter:
`linux/filter.h`, `linux/seccomp.h`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

# (AUDIT_ARCH, column of the tables)
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NONE = -1
_ALLOWED = {
    # Bytes of what is open, and files to read.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18,
        68), "lseek": (8, 62),
    "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, _NONE), "dup3": (292, 24), "fsync": (74,
        82), "fdatasync": (75, 83),
    "fstat": (5, 80), "stat": (4, _NONE), "lstat": (6, _NONE), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, _NONE),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, _NONE), "readlinkat": (267, 78), "getcwd": (79,
        17), "chdir": (80, 49),
    "fchdir": (81, 50), "getdents64": (217, 61), "statfs": (137, 43), "fstatfs": (138, 44), "umask": (95, 166),
    # Memory.
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214),
    "msync": (26, 227),
    # Waiting; pipes within the process.
    "poll": (7, _NONE), "ppoll": (271, 73), "select": (23, _NONE), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, _NONE), "epoll_pwait": (281, 22), "eventfd2": (290, 19), "pipe": (22, _NONE), "pipe2": (293,
        59),
    "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210), "getsockopt": (55, 209), "getsockname": (51,
        204),
    "getpeername": (52, 205),
    # Who and where it is.
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177), "getgroups": (115, 158), "getpgid": (121, 155), "getpgrp": (111, _NONE), "getsid": (124,
        156),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpriority": (140, 141), "uname": (63, 160), "sysinfo": (99,
        179),
    "times": (100, 153), "getrusage": (98, 165), "getcpu": (309, 168), "getrlimit": (97, 163), "setrlimit": (160, 164),
    # Time, chance, signals, threads, the end.
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, _NONE), "getrandom": (318, 278), "alarm": (37, _NONE), "setitimer": (38, 103), "getitimer": (36,
        102), "pause": (34, _NONE),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "restart_syscall": (219,
        128),
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96),
    "membarrier": (324, 283), "arch_prctl": (158, _NONE), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "wait4": (61, 260), "waitid": (247, 95),
    "exit": (60, 93),
    "exit_group": (231, 94),
}  # fmt: skip
# Allowed with some arguments; `_rules` says which.
_WITH_ARGUMENTS = {
    "open": (2, _NONE), "openat": (257, 56), "clone": (56, 220), "socketpair": (53, 199), "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167), "prlimit64": (302, 261), "kill": (62, 129), "tgkill": (234, 131),
}  # fmt: skip
_CLONE3 = (435, 435)
_WRITING = (
    os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY)
)
_THREAD = 0x10000  # CLONE_THREAD
_FCNTL = (
    0,
    1,
    2,
    3,
    4,
    1030,
    1032,
)  # F_DUPFD, F_GETFD .. F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; F_SETOWN would send signals
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_PRCTL = (15, 16)  # PR_SET_NAME, PR_GET_NAME
_STREAM = (1, 1 | os.O_CLOEXEC, 1 | os.O_NONBLOCK, 1 | os.O_CLOEXEC | os.O_NONBLOCK)

_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NR, _ARCH = 0, 4  # of struct seccomp_data; argument n is at 16 + 8 n

Instruction = tuple[int, int, int, int]


def filter_calls() -> None:
    """From now on this process makes no other system calls than these.

    Raises:
        OSError: this kernel or this processor has no filter.
    """
    program = b"".join(struct.pack("HBBI", *each) for each in rules(os.uname().machine, os.getpid()))
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    zero, one, two = ctypes.c_ulong(0), ctypes.c_ulong(1), ctypes.c_ulong(2)
    # PR_SET_NO_NEW_PRIVS; PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    if libc.prctl(38, one, zero, zero, zero) or libc.prctl(22, two, ctypes.c_char_p(header), zero, zero):
        number = ctypes.get_errno()
        raise OSError(number, f"this kernel takes no filter of system calls ({os.strerror(number)})")


def rules(machine: str, pid: int) -> list[Instruction]:
    """The filter as instructions of the kernel's machine: code, jump if so, jump if not, value.

    Raises:
        OSError: of this processor no numbers are known.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known")
    arch, column = _ARCHITECTURES[machine]
    streams = _if_one_of(1, _STREAM)
    with_arguments = {
        "openat": _unless_any_bit(2, _WRITING),
        "open": _unless_any_bit(1, _WRITING),
        "clone": [*_load(0), (_ANY_BIT, 0, 1, _THREAD), (_RETURN, 0, 0, _ALLOW)],
        "socketpair": [*_load(0), (_EQUAL, 0, len(streams), 1), *streams],  # AF_UNIX
        "fcntl": _if_one_of(1, _FCNTL),
        "ioctl": _if_one_of(1, _IOCTL),
        "prctl": _if_one_of(0, _PRCTL),
        "prlimit64": _if_one_of(0, (0,)),
        "kill": _if_one_of(0, (pid,)),
        "tgkill": _if_one_of(0, (pid,)),
    }
    made: list[Instruction] = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NR)]
    for numbers in _ALLOWED.values():
        if numbers[column] != _NONE:
            made += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ALLOW)]
    for name, looks in with_arguments.items():
        number = _WITH_ARGUMENTS[name][column]
        if number != _NONE:
            denied = (_RETURN, 0, 0, _ERROR | errno.EPERM)
            made += [(_EQUAL, 0, len(looks) + 1, number), *looks, denied]
    # glibc then makes its threads with clone, whose flags can be looked at.
    made += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    return [*made, (_RETURN, 0, 0, _ERROR | errno.EPERM)]


def _load(argument: int) -> list[Instruction]:
    return [(_LOAD, 0, 0, 16 + 8 * argument)]  # its low half; the kernel reads no more of these


def _if_one_of(argument: int, values: Sequence[int]) -> list[Instruction]:
    found = [each for value in values for each in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
    return [*_load(argument), *found]


def _unless_any_bit(argument: int, bits: int) -> list[Instruction]:
    return [*_load(argument), (_ANY_BIT, 1, 0, bits), (_RETURN, 0, 0, _ALLOW)]
