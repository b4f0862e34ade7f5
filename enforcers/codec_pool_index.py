"""Max-pool indices name a place in the input plane; inside the pooling window it is one of k·k taps: 4 bits, or 8.

Exact for every kernel, stride, padding, dilation and ceil_mode in two and three dimensions; checked while encoding by
computing every index back, so that indices which somebody else made are declined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from memopt.enforcers.bits import pack_nibbles, unpack_nibbles
from memopt.enforcers.codec_sizes import CHUNK_CELLS
from memopt.enforcers.encoded import Encoded, is_plain, meta_of, new_cells

name = "pool_index"
of_values = False


@dataclass(frozen=True, slots=True)
class _Window:
    """One pooling, its parameters spelled out per spatial dimension; `plane` is the input's spatial size."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    plane: tuple[int, ...]

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    def starts(self, dimension: int, like: torch.Tensor) -> torch.Tensor:
        """Input coordinate of tap 0 for every output place along `dimension`, shaped to broadcast."""
        rank, length = len(self.kernel), like.shape[dimension - len(self.kernel)]
        places = torch.arange(length, dtype=like.dtype, device=like.device)
        begin = places * self.stride[dimension] - self.padding[dimension]
        return begin.view(-1, *[1] * (rank - 1 - dimension))

    def taps_of(self, index: torch.Tensor) -> torch.Tensor:
        taps = torch.zeros_like(index)
        rest, weight = index, 1
        for d in reversed(range(len(self.kernel))):
            coordinate = rest % self.plane[d]
            rest = rest.div(self.plane[d], rounding_mode="floor")
            taps += (coordinate - self.starts(d, index)).div_(
                self.dilation[d], rounding_mode="floor"
            ) * weight
            weight *= self.kernel[d]
        return taps

    def index_of(self, taps: torch.Tensor) -> torch.Tensor:
        index = torch.zeros_like(taps)
        weight = self.taps
        for d in range(len(self.kernel)):
            weight //= self.kernel[d]
            tap = taps.div(weight, rounding_mode="floor") % self.kernel[d]
            index = index * self.plane[d] + (tap * self.dilation[d] + self.starts(d, taps))
        return index


def _window(params: Mapping[str, object]) -> _Window | None:
    size = params.get("self.size")
    kernel = params.get("kernel_size")
    if not isinstance(size, list | tuple) or not isinstance(kernel, list | tuple):
        return None
    rank = len(kernel)

    def per_dimension(key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = params.get(key)
        value = tuple(value) if isinstance(value, list | tuple) and value else default
        return value * rank if len(value) == 1 else value

    kernel = tuple(kernel)
    window = _Window(
        kernel,
        per_dimension("stride", kernel),
        per_dimension("padding", (0,)),
        per_dimension("dilation", (1,)),
        tuple(size[-rank:]),
    )
    parts = (window.stride, window.padding, window.dilation, window.plane)
    whole = rank in (2, 3) and all(len(part) == rank for part in parts)
    return window if whole and 0 < window.taps <= 256 and math.prod(window.plane) < 2**31 else None


def encode(tensor: torch.Tensor, params: Mapping[str, object]) -> Encoded | None:
    window = _window(params)
    if window is None or not is_plain(tensor) or tensor.dtype != torch.int64 or not tensor.numel():
        return None
    meta = meta_of(tensor)
    if meta.cells != meta.numel or tensor.dim() <= len(window.kernel):
        return None
    taps = torch.empty_strided(meta.size, meta.stride, dtype=torch.uint8, device=meta.device)
    for index, into in _planes(tensor.detach(), taps):
        narrow = index.to(torch.int32)
        found = window.taps_of(narrow)
        exact = (window.index_of(found) == index) & (found >= 0) & (found < window.taps)
        if not bool(exact.all()):
            return None
        into.copy_(found)
    row = taps.as_strided((meta.cells,), (1,), 0)
    return Encoded(name, meta, (pack_nibbles(row) if window.taps <= 16 else row,), dict(params))


def decode(encoded: Encoded) -> torch.Tensor:
    window = _window(encoded.params)
    assert window is not None, "encode has accepted these parameters"
    tensor, _ = new_cells(encoded.meta)
    (row,) = encoded.payload
    row = unpack_nibbles(row, encoded.meta.cells) if window.taps <= 16 else row
    taps = row.as_strided(encoded.meta.size, encoded.meta.stride, row.storage_offset())
    for part, into in _planes(taps, tensor):
        into.copy_(window.index_of(part.to(torch.int32)))
    return tensor


def _planes(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors in step, some samples (or, where memory is in that order, some planes) at a time."""
    if source.is_contiguous() and target.is_contiguous() and source.dim() > 3:
        source, target = source.flatten(0, 1), target.flatten(0, 1)
    step = max(1, CHUNK_CELLS // max(1, source[0].numel()))
    for start in range(0, source.shape[0], step):
        yield source[start : start + step], target[start : start + step]
