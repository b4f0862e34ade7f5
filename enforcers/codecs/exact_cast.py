"""Floats that came from a narrower type (an fp32 operation of autocast fed with bf16) go back to it, if every bit survives."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memopt.enforcers.codecs.encoded import (
    Encoded,
    bits_of,
    cells_of,
    chunks_of,
    is_plain,
    meta_of,
    new_cells,
)

name = "exact_cast"

_HALVES = {torch.float32: (torch.bfloat16, torch.float16), torch.float64: (torch.float32,)}


def encode(tensor: torch.Tensor, params: Mapping[str, object]) -> Encoded | None:
    if not is_plain(tensor):
        return None
    meta, cells = meta_of(tensor), cells_of(tensor)
    for half in _HALVES.get(tensor.dtype, ()):
        payload = _cast(cells, half)
        if payload is not None:
            return Encoded(name, meta, (payload,), {})
    return None


def _cast(cells: torch.Tensor, half: torch.dtype) -> torch.Tensor | None:
    """`cells` in `half`, or None at the first chunk whose bits (NaN payloads included) do not come back."""
    payload: torch.Tensor | None = None
    for part in chunks_of(cells.numel(), cells.device):
        narrow = cells[part].to(half)
        if not torch.equal(bits_of(narrow.to(cells.dtype)), bits_of(cells[part])):
            return None
        if payload is None:
            payload = torch.empty(cells.numel(), dtype=half, device=cells.device)
        payload[part] = narrow
    return torch.empty(0, dtype=half, device=cells.device) if payload is None else payload


def decode(encoded: Encoded) -> torch.Tensor:
    tensor, cells = new_cells(encoded.meta)
    cells.copy_(encoded.payload[0])
    return tensor
