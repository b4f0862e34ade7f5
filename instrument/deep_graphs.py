"""Room on the stack for graphs that are tens of thousands of nodes deep.

A node that Python has looked at keeps its wrapper for as long as it lives, and from torch 2.12 or 2.13 on the wrapper frees the node, and
within that the next one below it (THPCppFunction_dealloc); nodes that nobody has looked at are freed one after the other. Some fifteen
thousand in a row overflow a stack of 8 MB, and the process dies when the script lets go of its loss. A plain run looks at none.
"""

from __future__ import annotations

import sys

DEEP = 5_000
"""Ops or saved tensors of a graph for which room is made."""
_STACK_BYTES = 1 << 30


def make_room() -> None:
    """Let the main thread's stack grow further, where the system allows it: Linux asks for the limit when the stack grows."""
    if not sys.platform.startswith("linux"):
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, _STACK_BYTES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
