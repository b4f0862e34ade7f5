"""The stream of a device on which saved tensors are made, let go of and asked for again: one, or they stay.

Autograd keeps a saved tensor until backward, by when a script has its streams wait for one another. Who lets go of it before has
nothing but the stream that happens to be current, which need not have waited for the one that the tensor was made on; and what was made
again on one stream may be read on another that has not waited either. A copy would read, or backward would use, what is not there yet.
"""

from __future__ import annotations

from typing import Any

import torch

from memopt.instrument.torch_internals import raw_cuda_stream

SEVERAL = "the script computes on several streams, and this was not saved and let go of on the first"


def current_stream(device: torch.device) -> Any:
    """The stream that this thread computes on there, or what tells it from others; None on a CPU. The seam: tests put pretended streams
    here. Asked for each saved tensor: CUDA's own number of a stream takes a tenth of the time of an object for it."""
    if device.type == "cuda":
        return raw_cuda_stream(device.index)
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


class OneStream:
    """The first stream of each device, of one iteration."""

    def __init__(self) -> None:
        self._first: dict[torch.device, Any] = {}

    def why_keep(self, device: torch.device) -> str:
        """Why a tensor on `device` stays that is saved, or is to be let go of, just now; empty: it may go."""
        here = current_stream(device)
        return "" if here is None or here == self._first.setdefault(device, here) else SEVERAL

    def new_iteration(self) -> None:
        self._first.clear()
