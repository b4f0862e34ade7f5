"""How much of the host's memory this process may still take: of the machine's, and of each control group that it is in."""

from __future__ import annotations

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """The least of what the machine and the groups have left, without swapping; None where the system does not tell."""
    known = [left for left in (_of_machine(root), *_of_groups(root)) if left is not None]
    return min(known, default=None)


def _of_machine(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_groups(root: Path) -> list[int | None]:
    """What each group from this process's own up to the root leaves; inside a container the path may not be there."""
    found: list[int | None] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, file = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            file = "total_inactive_file"
        else:
            continue
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            folder = root / base / group
            found.append(_left(folder / limit, folder / usage, folder / "memory.stat", file))
    return found


def _left(limit: Path, usage: Path, statistics: Path, file: str) -> int | None:
    """Limit less use, of which the page cache that nobody has read lately goes first; None where there is no limit."""
    most, used = _number(limit), _number(usage)
    if most is None or used is None or most >= 1 << 60:
        return None
    cached = next((int(line.split()[1]) for line in _lines(statistics) if line.split()[:1] == [file]), 0)
    return max(0, most - used + cached)


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
