"""Integers that fit a narrower type (class labels, sort and gather indices): held narrow, widened for their reader."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memopt.enforcers.codecs.encoded import Encoded, cells_of, is_plain, meta_of, new_cells

name = "narrow_int"
of_values = True

_NARROWER = (torch.uint8, torch.int16, torch.int32)


def encode(tensor: torch.Tensor, params: Mapping[str, object]) -> Encoded | None:
    if not is_plain(tensor) or tensor.dtype not in (torch.int64, torch.int32, torch.int16):
        return None
    meta, cells = meta_of(tensor), cells_of(tensor)
    narrow = _narrowest(cells)
    if narrow is None or narrow.itemsize >= meta.itemsize:
        return None
    return Encoded(name, meta, (cells.to(narrow),), {"narrow_dtype": str(narrow).removeprefix("torch.")})


def _narrowest(cells: torch.Tensor) -> torch.dtype | None:
    if not cells.numel():
        return torch.uint8
    low, high = (int(v) for v in torch.stack(torch.aminmax(cells)).tolist())
    for dtype in _NARROWER:
        info = torch.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return dtype
    return None


def decode(encoded: Encoded) -> torch.Tensor:
    tensor, cells = new_cells(encoded.meta)
    cells.copy_(encoded.payload[0])
    return tensor
