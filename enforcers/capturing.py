"""Whether CUDA is recording a graph just now: what is queued then happens at each replay, with the addresses of today.

So nothing may be taken away that the graph reads, no copy may be queued into it, and asking an event whether it has come to pass ends
the recording with an error. `torch.compile(mode="reduce-overhead")` keeps memory of its own between its graphs (cudagraph trees), and
decides by who still holds a tensor what the next graph may write over: there every saved tensor stays.
"""

from __future__ import annotations

import torch

from memopt.instrument.torch_internals import Gone, graph_trees


def on_this_stream() -> bool:
    """Whatever device there is."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Capturing:
    """Of `device`'s type, asked before each thing that a graph must not see."""

    def __init__(self, device: str) -> None:
        self._can_be = device == "cuda"

    def now(self) -> bool:
        """On this thread's stream."""
        return self._can_be and torch.cuda.is_current_stream_capturing()

    def why_keep(self) -> str:
        """Why no saved tensor may be taken away now; empty: it may."""
        if not self._can_be:
            return ""
        if self.now():
            return "a CUDA graph was being captured"
        return "torch.compile runs CUDA graphs of its own (cudagraph trees)" if _graph_trees() else ""


def _graph_trees() -> bool:
    trees = graph_trees()
    if trees is None:
        return False
    if isinstance(trees, Gone):
        return True  # perhaps: then nothing is taken away
    containers = getattr(trees, "tree_manager_containers", {})
    return any(getattr(each, "tree_manager", None) is not None for each in containers.values())
