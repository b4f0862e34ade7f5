"""What the host has left, from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.enforcers.tiers import accelerator
from memopt.enforcers.tiers.accelerator import most_bytes
from memopt.instrument.memory.host_memory import available_bytes


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": "MemTotal:  100 kB\nMemAvailable:  10 kB\n"})
    return tmp_path


def test_of_a_machine_without_groups(root: Path) -> None:
    assert available_bytes(root) == 10240


def test_the_tightest_group_of_all_above_counts(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "100\n",
            "sys/fs/cgroup/job/memory.max": "9000\n",
            "sys/fs/cgroup/job/memory.current": "5000\n",
            "sys/fs/cgroup/job/memory.stat": "anon 4000\ninactive_file 1000\n",
        },
    )
    assert available_bytes(root) == 5000


def test_the_older_kind_of_group(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/job\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "6000\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "5000\n",
        },
    )
    assert available_bytes(root) == 1000


def test_ranks_of_one_machine_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "available_bytes", lambda: 10_000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert most_bytes() == 9000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert most_bytes() == 2250
    monkeypatch.setattr(accelerator, "available_bytes", lambda: None)
    assert most_bytes() is None


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_on_this_machine() -> None:
    found = available_bytes()
    assert found is None or 1 << 20 < found < 1 << 50
