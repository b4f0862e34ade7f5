"""A tensor whose elements are only ever two bit patterns (dropout's {0, 1/(1-p)} noise, 0/1 masks in float): one bit each.

Which two is found while encoding; a third pattern means that the tensor is declined and kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memopt.codecs.meta import bitmap_bytes
from memopt.enforcers.codecs.bits import fill_by_bits, first_set, pack_bits, quick_row
from memopt.enforcers.codecs.encoded import (
    Encoded,
    bits_of,
    cells_of,
    chunks_of,
    is_plain,
    meta_of,
    new_cells,
)

name = "two_valued"


def encode(tensor: torch.Tensor, params: Mapping[str, object]) -> Encoded | None:
    if not is_plain(tensor) or tensor.numel() == 0 or tensor.element_size() > 8:
        return None
    meta, cells = meta_of(tensor), bits_of(cells_of(tensor))
    pair, row = cells[:1].repeat(2), quick_row(cells)
    first, second = row[0], None
    bitmap = torch.empty(bitmap_bytes(meta.cells), dtype=torch.uint8, device=meta.device)
    for part in chunks_of(meta.cells, meta.device):
        chunk = row[part]
        differs = chunk != first
        if second is None and bool(differs.any()):
            second = chunk[first_set(differs)]
        if second is not None and bool((differs != (chunk == second)).any()):
            return None
        pack_bits(differs, bitmap[part.start // 8 : bitmap_bytes(part.stop)])
    if second is not None:
        pair[1] = int(second)
    return Encoded(name, meta, (bitmap, pair), {})


def decode(encoded: Encoded) -> torch.Tensor:
    tensor, cells = new_cells(encoded.meta)
    bitmap, pair = encoded.payload
    out = bits_of(cells)
    for part in chunks_of(encoded.meta.cells, encoded.meta.device):
        fill_by_bits(bitmap[part.start // 8 : bitmap_bytes(part.stop)], out[part], pair[0], pair[1])
    return tensor
