"""Max-pool indices name a place in the input plane; inside the pooling window it is one of k·k taps: 4 bits, or 8.

An index is its window's origin plus its tap's step, and both come from small tables. Exact for every kernel, stride, padding,
dilation and ceil_mode in two and three dimensions; an index that is no tap of its window (somebody else made it) is declined on a CPU.
On a GPU nothing is looked at, since that would wait for the device: what a max-pool's node saved as its own output are taps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from memopt.codecs.meta import CHUNK_CELLS
from memopt.enforcers.codecs.bits import pack_nibbles, unpack_nibbles
from memopt.enforcers.codecs.encoded import Encoded, is_plain, meta_of, new_cells

name = "pool_index"


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

    def origins(self, outputs: Sequence[int], device: torch.device | str) -> torch.Tensor:
        """For every output place the index (perhaps outside the plane) of its window's first tap."""
        origins = torch.zeros((), dtype=torch.int64, device=device)
        for d, length in enumerate(outputs):
            begin = torch.arange(length, device=device) * self.stride[d] - self.padding[d]
            origins = (origins * self.plane[d]).unsqueeze(-1) + begin
        return origins

    @property
    def last_step(self) -> int:
        """The largest of `steps`."""
        reach = 0
        for kernel, dilation, plane in zip(self.kernel, self.dilation, self.plane, strict=True):
            reach = reach * plane + (kernel - 1) * dilation
        return reach

    def steps(self, device: torch.device | str) -> torch.Tensor:
        """For every tap its index relative to the first one's."""
        steps = torch.zeros(1, dtype=torch.int64, device=device)
        for d in range(len(self.kernel)):
            along = torch.arange(self.kernel[d], device=device) * self.dilation[d]
            steps = ((steps * self.plane[d]).unsqueeze(-1) + along).flatten()
        return steps


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
    origins, tap_at = (
        window.origins(meta.size[-len(window.kernel) :], meta.device),
        _tap_at(window, meta.device),
    )
    for index, into in _planes(tensor.detach(), taps):
        steps = index - origins
        if steps.device.type != "cpu":
            into.copy_(tap_at[steps.clamp_(0, tap_at.numel() - 1)])
            continue
        low, high = torch.stack(torch.aminmax(steps)).tolist()
        if low < 0 or high >= tap_at.numel():
            return None
        found = tap_at[steps]
        if bool((found < 0).any()):
            return None
        into.copy_(found)
    row = taps.as_strided((meta.cells,), (1,), 0)
    return Encoded(name, meta, (pack_nibbles(row) if window.taps <= 16 else row,), dict(params))


def _tap_at(window: _Window, device: str) -> torch.Tensor:
    """From a step back to its tap (of several, any: they mean the same place); -1 where no tap is."""
    steps = window.steps(device)
    tap_at = torch.full((window.last_step + 1,), -1, dtype=torch.int16, device=device)
    tap_at[steps] = torch.arange(window.taps, dtype=torch.int16, device=device)
    return tap_at


def decode(encoded: Encoded) -> torch.Tensor:
    window = _window(encoded.params)
    assert window is not None, "encode has accepted these parameters"
    tensor, _ = new_cells(encoded.meta)
    (row,) = encoded.payload
    row = unpack_nibbles(row, encoded.meta.cells) if window.taps <= 16 else row
    taps = row.as_strided(encoded.meta.size, encoded.meta.stride, row.storage_offset())
    origins = window.origins(encoded.meta.size[-len(window.kernel) :], encoded.meta.device)
    steps = window.steps(encoded.meta.device)
    for part, into in _planes(taps, tensor):
        torch.add(steps[part.to(torch.int32)], origins, out=into)
    return tensor


def _planes(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors in step, some samples (or, where memory is in that order, some planes) at a time."""
    if source.is_contiguous() and target.is_contiguous() and source.dim() > 3:
        source, target = source.flatten(0, 1), target.flatten(0, 1)
    step = max(1, CHUNK_CELLS // max(1, source[0].numel()))
    for start in range(0, source.shape[0], step):
        yield source[start : start + step], target[start : start + step]
