"""Zero-value compression (cDMA, HPCA 2018): one bit per element and the non-zero ones in order. Exact for every bit pattern.

"Zero" means all bits zero, so -0.0 and NaN travel as values. Declined unless it saves a tenth. A first pass counts, so that the
second writes straight into memory of the final size; both go in chunks. On one CPU core about 4 GB/s each way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

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
from memopt.estimators.simulator.codec_sizes import bitmap_bytes, predicted_bytes

name = "zero_bitmap"
of_values = True

WORTH_IT = 0.9
"""Encode only when the result is below this share of the plain bytes."""


def measure(tensor: torch.Tensor, params: Mapping[str, object]) -> int | None:
    """Bytes that `encode` would hold, or None where it would decline; one reading pass."""
    if not is_plain(tensor) or tensor.element_size() > 8 or tensor.numel() == 0:
        return None
    meta, bits = meta_of(tensor), bits_of(cells_of(tensor))
    nonzero = sum(_count_nonzero(bits[part]) for part in chunks_of(meta.cells, meta.device))
    held_bytes = predicted_bytes(name, meta, {"nonzero_cells": nonzero})
    return held_bytes if held_bytes < WORTH_IT * meta.cells * meta.itemsize else None


def _count_nonzero(bits: torch.Tensor) -> int:
    return (
        int(np.count_nonzero(bits.numpy())) if bits.device.type == "cpu" else int(torch.count_nonzero(bits))
    )


def encode(tensor: torch.Tensor, params: Mapping[str, object]) -> Encoded | None:
    held_bytes = measure(tensor, params)
    if held_bytes is None:
        return None
    meta, bits = meta_of(tensor), bits_of(cells_of(tensor))
    row = quick_row(bits)
    bitmap = torch.empty(bitmap_bytes(meta.cells), dtype=torch.uint8, device=meta.device)
    values = torch.empty((held_bytes - bitmap.numel()) // meta.itemsize, dtype=bits.dtype, device=meta.device)
    filled = 0
    for part in chunks_of(meta.cells, meta.device):
        present = row[part] != 0
        pack_bits(present, bitmap[part.start // 8 : bitmap_bytes(part.stop)])
        filled += _gather(row[part], present, values[filled:])
    return Encoded(name, meta, (bitmap, values), {"nonzero_cells": values.numel()})


def _gather(row: Row, present: Row, into: torch.Tensor) -> int:
    if isinstance(row, torch.Tensor):
        picked = torch.masked_select(row, present)
        into[: picked.numel()] = picked
        return picked.numel()
    where = np.flatnonzero(present)
    np.take(row, where, out=into.numpy()[: where.size], mode="clip")
    return int(where.size)


def _scatter(values: torch.Tensor, present: torch.Tensor, into: torch.Tensor) -> int:
    into.zero_()
    if values.device.type != "cpu":
        into.masked_scatter_(present, values)
        return int(present.sum())
    where = np.flatnonzero(present.numpy())
    into.numpy()[where] = values.numpy()[: where.size]
    return int(where.size)


def decode(encoded: Encoded) -> torch.Tensor:
    tensor, cells = new_cells(encoded.meta)
    bitmap, values = encoded.payload
    out, used = bits_of(cells), 0
    for part in chunks_of(encoded.meta.cells, encoded.meta.device):
        present = unpack_bits(bitmap[part.start // 8 : bitmap_bytes(part.stop)], part.stop - part.start)
        used += _scatter(values[used:], present, out[part])
    return tensor
