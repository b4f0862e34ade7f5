"""Zero-value compression (cDMA, HPCA 2018): one bit per element and the non-zero ones in order. Exact for every bit pattern.

"Zero" means all bits zero, so -0.0 and NaN travel as values. Declined unless it saves a tenth. A first pass counts, so that the
second writes straight into memory of the final size; both go in chunks. With `nonzero_cells` there is room for so many, as was planned,
so that every iteration takes the same bytes; for more where there are more.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from memopt.codecs.meta import bitmap_bytes
from memopt.codecs.of_values import WORTH_IT
from memopt.enforcers.codecs.bits import Row, pack_bits, quick_row, unpack_bits
from memopt.enforcers.codecs.encoded import (
    Encoded,
    bits_of,
    cells_of,
    chunks_of,
    is_plain,
    meta_of,
    new_cells,
)
from memopt.instrument.arrays import array_over

name = "zero_bitmap"


def _count_nonzero(bits: torch.Tensor) -> int:
    return (
        int(np.count_nonzero(array_over(bits)))
        if bits.device.type == "cpu"
        else int(torch.count_nonzero(bits))
    )


def encode(tensor: torch.Tensor, params: Mapping[str, object]) -> Encoded | None:
    if not is_plain(tensor) or tensor.element_size() > 8 or tensor.numel() == 0:
        return None
    meta, bits = meta_of(tensor), bits_of(cells_of(tensor))
    nonzero, planned = sum(_count_nonzero(bits[part]) for part in chunks_of(meta.cells, meta.device)), 0
    if isinstance(wanted := params.get("nonzero_cells"), int):
        planned = min(wanted, meta.cells)
    room = max(nonzero, planned)
    if bitmap_bytes(meta.cells) + room * meta.itemsize >= WORTH_IT * meta.plain_bytes:
        return None
    row = quick_row(bits)
    bitmap = torch.empty(bitmap_bytes(meta.cells), dtype=torch.uint8, device=meta.device)
    values = torch.empty(room, dtype=bits.dtype, device=meta.device)
    filled = 0
    for part in chunks_of(meta.cells, meta.device):
        present = row[part] != 0
        pack_bits(present, bitmap[part.start // 8 : bitmap_bytes(part.stop)])
        filled += _gather(row[part], present, values[filled:])
    return Encoded(name, meta, (bitmap, values), {"nonzero_cells": room})


def _gather(row: Row, present: Row, into: torch.Tensor) -> int:
    if isinstance(row, torch.Tensor):
        picked = torch.masked_select(row, present)
        into[: picked.numel()] = picked
        return picked.numel()
    where = np.flatnonzero(present)
    np.take(row, where, out=array_over(into)[: where.size], mode="clip")
    return int(where.size)


def _scatter(values: torch.Tensor, present: torch.Tensor, into: torch.Tensor) -> int:
    into.zero_()
    if values.device.type != "cpu":
        into.masked_scatter_(present, values)
        return int(present.sum())
    where = np.flatnonzero(array_over(present))
    array_over(into)[where] = array_over(values)[: where.size]
    return int(where.size)


def decode(encoded: Encoded) -> torch.Tensor:
    tensor, cells = new_cells(encoded.meta)
    bitmap, values = encoded.payload
    out, used = bits_of(cells), 0
    for part in chunks_of(encoded.meta.cells, encoded.meta.device):
        present = unpack_bits(bitmap[part.start // 8 : bitmap_bytes(part.stop)], part.stop - part.start)
        used += _scatter(values[used:], present, out[part])
    return tensor
