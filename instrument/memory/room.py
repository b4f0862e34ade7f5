"""What memory there is to be had: the budget of a run for which none was given."""

from __future__ import annotations

from memopt.instrument.memory.host_memory import available_bytes

_SHARE = 0.95
"""Of what is free on the host, where other programs live too."""


def free_bytes(kind: str) -> int | None:
    """Bytes that this process may take on a device of type `kind`, those that it has already included. None: not known.

    On a GPU its CUDA context counts too, on the host only what tensors may take.
    """
    if kind == "cpu":
        left = available_bytes()
        return None if left is None else int(_SHARE * left)
    import torch

    if kind != "cuda" or not torch.cuda.is_available():
        return None
    free = int(torch.cuda.mem_get_info()[0])
    from memopt.instrument.memory.cuda_statistics import process_bytes

    return free + (process_bytes(torch.cuda.current_device()) or torch.cuda.memory_reserved())
