"""A graph that is thousands of nodes deep is freed after memopt has looked at its nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "deep_graph.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the stack's limit is fixed")
def test_a_deep_graph_is_freed_after_its_nodes_were_recorded(tmp_path: Path) -> None:
    """On a stack of 1 MB, so that a small graph is deep: unless it may grow, the process dies at `del loss`."""
    command = f"ulimit -S -s 640; exec {sys.executable} -m memopt profile --warmup 0 --keep-running {SCRIPT}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith("done ")
