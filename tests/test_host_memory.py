"""What the host has left, from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.enforcers.host_memory import most_bytes


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    write(tmp_path, {"proc/meminfo": "MemTotal:  100 kB\nMemAvailable:  10 kB\n"})
    return tmp_path


def test_of_a_machine_without_groups(root: Path) -> None:
    assert most_bytes(root) == int(0.9 * 10240)


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
    assert most_bytes(root) == int(0.9 * 5000)


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
    assert most_bytes(root) == 900


def test_ranks_of_one_machine_share(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert most_bytes(root) == int(0.9 * 10240) // 4


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert most_bytes(tmp_path) is None


def test_on_this_machine() -> None:
    found = most_bytes()
    assert found is None or 1 << 20 < found < 1 << 50
