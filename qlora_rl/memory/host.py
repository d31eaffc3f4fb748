"""Memory of the machine, or of the container that this process is in. Linux; no library is asked."""

from __future__ import annotations

from pathlib import Path

GIB = 2**30


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
