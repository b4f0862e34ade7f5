"""What every script here prints: its losses to the last bit, and a digest of what it trained."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tell_loss(step: int, loss: torch.Tensor | float) -> None:
    """One line a step."""
    print(f"step {step} loss {float(loss).hex()}", flush=True)


def tell_state(model: torch.nn.Module, optimizer: Any = None) -> None:
    """A digest of parameters, buffers and the optimizer's state."""
    found = hashlib.sha256()
    tensors = dict(sorted(model.state_dict().items()))
    for index, state in enumerate(optimizer.state.values() if optimizer is not None else ()):
        tensors |= {f"{index} {key}": state[key] for key in sorted(state, key=str)}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            value = (
                value.dequantize()
                if hasattr(value, "dequantize")
                and value.dtype == torch.float32
                and type(value) not in (torch.Tensor, torch.nn.Parameter)
                else value
            )
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.numel() else value
            found.update(name.encode() + bytes(data.tolist()))
    print("state", found.hexdigest()[:16])
