"""The neutral graph of a recorded iteration: `python -m benchmarks.trace_graph PROFILE > graph.json`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from memopt.advisors.graphs.of_trace import graph_of
from memopt.trace import load_trace

if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.stdout.buffer.write(msgspec.json.encode(graph_of(load_trace(path), path.name.split(".")[0])))
