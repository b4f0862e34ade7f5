"""What the recorded iteration has left: saved tensors of a graph that lives on. The plan made from it has those of each iteration away, and
its first iteration begins with these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from memopt.enforcers.tiers.swap import SwapFailed, SwapTier, without_frames
from memopt.enforcers.tiers.swapped import LEAST_BYTES, SwappedStorage
from memopt.instrument.ops import is_lent, is_plain
from memopt.instrument.saved import Kept
from memopt.instrument.torch_internals import DisableTorchDispatch, storage_of, storage_use_count


def send_away(handles: Sequence[Kept], tier: SwapTier[Any]) -> None:
    """Move the storages of `handles` to `tier` that nobody else holds, small ones apart; a copy that fails leaves them where they are."""
    by_storage: dict[int, list[Kept]] = defaultdict(list)
    _wait_for_streams(handles)  # the script's other streams may have written them
    guard = DisableTorchDispatch()
    try:
        for handle in handles:
            if is_plain(handle.tensor):
                by_storage[storage_of(handle.tensor)._cdata].append(handle)
        leaving = [
            content
            for address, alike in by_storage.items()
            if (content := _sent(address, alike, tier)) is not None
        ]
        for content in leaving:
            content.wait_until_away()
        _wait_for_streams(handles)
        tier.collect()
    except SwapFailed as error:
        without_frames(error)  # the tickets still have the bytes
    finally:
        del guard


def _wait_for_streams(handles: Sequence[Kept]) -> None:
    for device in {handle.tensor.device for handle in handles if handle.tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def _sent(address: int, handles: list[Kept], tier: SwapTier[Any]) -> SwappedStorage | None:
    if storage_use_count(address) > len(handles) + 1:  # one is who asks
        return None
    storage = storage_of(handles[0].tensor)
    if storage.nbytes() < LEAST_BYTES or is_lent(storage):
        return None
    content = SwappedStorage(tier, storage)
    for handle in handles:
        handle.leave(content)
    return content
