"""Is it a check of gradients that calls backward, and no training?"""

from __future__ import annotations

import sys
from types import FrameType


def checks_gradients() -> bool:
    """Does `torch.autograd.gradcheck` call the function that asks? It calls backward for each element of an output, and trains nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.autograd.gradcheck":
        frame = frame.f_back
    return frame is not None
