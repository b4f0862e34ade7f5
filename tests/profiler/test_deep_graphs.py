"""A graph that is thousands of nodes deep is freed after memopt has looked at its nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import warm

SCRIPT = Path(__file__).parents[1] / "scripts" / "deep_graph.py"
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_STACK, (640 << 10, resource.getrlimit(resource.RLIMIT_STACK)[1]))
from memopt.cli.main import main
main()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the stack's limit is fixed")
def test_a_deep_graph_is_freed_after_its_nodes_were_recorded(tmp_path: Path) -> None:
    """On a stack of 1 MB, so that a small graph is deep: unless it may grow, the process dies at `del loss`."""
    done = warm.python(
        ["-c", LIMITED, "profile", "--warmup", "0", "--keep-running", str(SCRIPT)], cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith("done ")
