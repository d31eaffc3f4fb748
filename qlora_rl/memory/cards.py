"""What a card sold as 24 GB has: the size is a name, and what CUDA reports is less. And what this machine has."""

from __future__ import annotations

import re
from pathlib import Path

GIB = 2**30
# GB on the box -> GiB, rounded down, that the card of this size with the least of it reports to CUDA. Error correction,
# firmware and driver take the rest. From the totals in PyTorch's out-of-memory messages in public issues: 24 is an A10G
# or L4 (RTX 4090: 23.6), 16 a T4.
CARDS: dict[float, float] = {
    8: 7.6,
    10: 9.6,
    12: 11.4,
    16: 14.5,
    24: 21.9,
    32: 31.3,
    40: 39.3,
    48: 44.3,
    80: 79.1,
    94: 93.0,
    96: 94.4,
    141: 139.7,
    180: 178.3,
}
# Of a card: fragmentation of the allocator, which the estimate does not count, and other small processes.
RESERVE_GIB = 0.5
# Of what a run may hold, the part that the KV cache leaves free where it could take all: the estimate is not exact.
ROOM = 0.02
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:g|gb|gib)?\s*", re.IGNORECASE)


def card_size(given: str | float) -> float:
    """The number of 24, "24", "24GB" and "24GiB": a unit changes nothing, as `usable_gib` knows the sizes of cards.

    Raises:
        ValueError: it is no number above 0.
    """
    found = _SIZE.fullmatch(given) if isinstance(given, str) else None
    number = float(found[1]) if found else given
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise ValueError(f"{given!r} is not a size such as 24 or '24GB'")
    return number


def usable_gib(gpu_memory: float) -> float:
    """GiB that a run may hold: of a number in `CARDS`, what such a card reports less the reserve; any other number as
    it stands."""
    return CARDS[gpu_memory] - RESERVE_GIB if gpu_memory in CARDS else gpu_memory


def memory_gib(root: Path = Path("/")) -> tuple[float, float]:
    """GiB of the machine, or of the container where that has less; and how much of it is available.

    Raises:
        OSError: there is no /proc/meminfo.
        KeyError: it says nothing of that.
    """
    pages = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    total, free = (int(pages[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    group = root / "sys/fs/cgroup"
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit.isdigit() and int(limit) / GIB < total:
            held = int((group / "memory.current").read_text()) - _file_pages(group / "memory.stat")
            return int(limit) / GIB, min(free, (int(limit) - held) / GIB)
    except OSError:  # no cgroup, or an older one
        pass
    return total, free


def _file_pages(stat: Path) -> int:
    """Bytes of files that the kernel keeps and gives up when memory is asked for: a cgroup counts them as its own."""
    try:
        known = dict(line.split() for line in stat.read_text().splitlines())
    except OSError:
        return 0
    return int(known.get("active_file", 0)) + int(known.get("inactive_file", 0))
