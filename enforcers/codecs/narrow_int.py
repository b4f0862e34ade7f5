"""Integers that fit a narrower type (class labels, sort and gather indices): held narrow, widened for their reader.

With `narrow_dtype` they are held in the type that was planned, so that every iteration takes the same bytes; in a wider one where they do
not fit it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memopt.codecs.of_values import NARROWER, narrowest
from memopt.enforcers.codecs.encoded import Encoded, cells_of, is_plain, meta_of, new_cells

name = "narrow_int"


def encode(tensor: torch.Tensor, params: Mapping[str, object]) -> Encoded | None:
    if not is_plain(tensor) or tensor.dtype not in (torch.int64, torch.int32, torch.int16):
        return None
    meta, cells = meta_of(tensor), cells_of(tensor)
    narrow = _type_for(cells, str(params.get("narrow_dtype")))
    if narrow is None or (dtype := getattr(torch, narrow)).itemsize >= meta.itemsize:
        return None
    return Encoded(name, meta, (cells.to(dtype),), {"narrow_dtype": narrow})


def _type_for(cells: torch.Tensor, planned: str) -> str | None:
    """The name of the narrowest type that holds `cells`, or of the planned one where that does."""
    low, high = (int(v) for v in torch.stack(torch.aminmax(cells)).tolist()) if cells.numel() else (0, 0)
    least, most = NARROWER.get(planned, (1, 0))
    return planned if least <= low and high <= most else narrowest(low, high)


def decode(encoded: Encoded) -> torch.Tensor:
    tensor, cells = new_cells(encoded.meta)
    cells.copy_(encoded.payload[0])
    return tensor
