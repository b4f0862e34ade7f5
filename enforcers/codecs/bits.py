"""Eight booleans in a byte and two nibbles in a byte, exactly and back.

numpy packs fastest on a CPU; elsewhere a multiplication gathers eight bytes' lowest bits into the topmost byte of an int64
(little-endian hosts, which is what torch supports). Bit order is little in both, so a payload may move between devices.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from memopt.instrument.arrays import array_over

Row: TypeAlias = Any
"""A flat tensor, or an array; both compare, slice and count alike."""

_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool)
_GATHER = 0x0102040810204080
_SPREAD = 0x0101010101010101
_SELECT = 0x8040201008040201 - (1 << 64)


def quick_row(cells: torch.Tensor) -> Row:
    """The flat `cells`, as an array where they are a CPU's: numpy compares integers ten times as fast as torch there."""
    return array_over(cells) if cells.device.type == "cpu" else cells


def first_set(mask: Row) -> int:
    """Position of the first true element; there is one."""
    return int(mask.to(torch.uint8).argmax() if isinstance(mask, torch.Tensor) else mask.argmax())


def pack_bits(mask: Row, into: torch.Tensor) -> None:
    """Write the flat bool `mask` as bits to the uint8 row `into` (one byte per eight, the last one padded with zeros)."""
    if isinstance(mask, torch.Tensor) and mask.device.type != "cpu":
        into.copy_(_gathered(mask))
    else:
        into.copy_(torch.from_numpy(np.packbits(np.asarray(mask), bitorder="little")))


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` bits of `packed` as a bool row."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(array_over(packed), count=count, bitorder="little")).view(
            torch.bool
        )
    return spread_bits(packed, count)


def fill_by_bits(
    packed: torch.Tensor, into: torch.Tensor, unset: torch.Tensor, bit_set: torch.Tensor
) -> None:
    """`into` = `bit_set` where the bit of `packed` is set, else `unset`; all three integers of one width.

    On a CPU a byte's eight values are looked up at once.
    """
    if into.device.type != "cpu":
        torch.where(spread_bits(packed, into.numel()), bit_set, unset, out=into)
        return
    octets = np.where(_BITS_OF_BYTE, *(array_over(each.reshape(1)) for each in (bit_set, unset)))
    row, source = array_over(into), array_over(packed)
    whole, rest = divmod(row.size, 8)
    np.take(octets, source[:whole], axis=0, out=row[: 8 * whole].reshape(whole, 8), mode="clip")
    if rest:
        row[8 * whole :] = octets[source[whole], :rest]


def gather_bits(mask: torch.Tensor) -> torch.Tensor:
    """`pack_bits` in plain torch operations, for devices that numpy does not reach."""
    return _gathered(mask).to(torch.uint8)


def _gathered(mask: torch.Tensor) -> torch.Tensor:
    """The same as the lowest bytes of int64. Few operations: each takes a GPU's host longer than the GPU."""
    count = mask.numel()
    if count % 8 == 0:
        octets = mask.to(torch.uint8)  # 0 or 1, whatever bytes stand for true
    else:
        octets = torch.zeros(-(-count // 8) * 8, dtype=torch.uint8, device=mask.device)
        octets[:count] = mask
    return octets.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56)


def spread_bits(packed: torch.Tensor, count: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """`unpack_bits` in plain torch operations; `into`: the bool row to fill."""
    octets = packed.to(torch.int64).mul_(_SPREAD).bitwise_and_(_SELECT).view(torch.uint8)
    octets = octets if octets.numel() == count else octets[:count]
    return octets != 0 if into is None else torch.ne(octets, 0, out=into)


def pack_nibbles(row: torch.Tensor) -> torch.Tensor:
    """A flat uint8 row of values below 16, two to a byte."""
    packed = torch.zeros(-(-row.numel() // 2), dtype=torch.uint8, device=row.device)
    packed[: row.numel() // 2] = row[1::2]
    return packed.bitwise_left_shift_(4).bitwise_or_(row[0::2])


def unpack_nibbles(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` nibbles of `packed` as a uint8 row."""
    return torch.stack((packed & 15, packed >> 4), 1).view(-1)[:count]
