"""Values that backward never reads cost nothing: only the shape is held.

The stand-in has the right size, strides, offset and dtype. On a CPU its storage has 0 bytes. Elsewhere, where a kernel touches the memory
without using it (`stand_in="real"`), and for strides that kernels first copy into a row of their own, it is real memory that lives only
while the reader runs: that costs bytes, never a crash.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memopt.codecs.of_readers import is_empty_stand_in
from memopt.enforcers.codecs.encoded import Encoded, is_plain, meta_of, new_cells

name = "nothing"


def encode(tensor: torch.Tensor, params: Mapping[str, object]) -> Encoded | None:
    if not is_plain(tensor):
        return None
    return Encoded(name, meta_of(tensor), (), dict(params))


def decode(encoded: Encoded) -> torch.Tensor:
    stand_in, cells = new_cells(encoded.meta)
    if cells.numel() and is_empty_stand_in(encoded.meta, encoded.params):
        stand_in.untyped_storage().resize_(0)
    return stand_in
