"""The saved tensors that the guard may send away: which leave first, and which come back before they are asked for."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor, UntypedStorage

from memopt.enforcers.guarding.live_bytes import Live
from memopt.enforcers.guarding.watched import Saved, Use, Watched
from memopt.enforcers.tiers.swap import SwapFailed, SwapTier, without_frames
from memopt.enforcers.tiers.swapped import SwappedStorage
from memopt.instrument.one_stream import OneStream
from memopt.instrument.torch_internals import storage_of, storage_use_count

if TYPE_CHECKING:
    from memopt.enforcers.values import Values

_NEWEST = 16
"""Storages that are tried whenever room is needed: an op's result is held by a local variable of the script's for a few ops."""
_OTHERS = 4
"""Where all were tried in vain, the others are tried again once room was needed so often, to this part of their number, or twice as much is
needed."""
_AHEAD = 2
"""Storages that are asked for next and come back before they are, where there is room."""


class Movable:
    """Nothing in here may be seen by a dispatch mode: who calls sees to that."""

    def __init__(self, tier: SwapTier[Any], live: Live, streams: OneStream, device: str) -> None:
        self._tier, self._live, self._streams = tier, live, streams
        self._is_cpu = device == "cpu"
        self._saved: OrderedDict[int, Saved] = OrderedDict()
        """By address, in the order of saving."""
        self._here: dict[int, Saved] = {}
        """Of these, what has not left: all that is tried where room is needed."""
        self._skips = 0
        """Times that room is needed for which only the newest are tried: what held the others holds most of them still."""
        self._in_vain_bytes = 0
        """Above the budget when all were tried in vain."""
        self._ahead: dict[int, SwappedStorage] = {}
        """By id: brought back before they are asked for, and not asked for yet."""
        self.values: Values | None = None
        """Of a plan beside which the guard holds the budget: what replays are made of may leave as well."""
        self.moved = 0
        """Storages that have left."""
        self.moved_bytes = 0

    def __bool__(self) -> bool:
        """Is anything saved?"""
        return bool(self._saved)

    def keep(self, tensor: Tensor, storage: UntypedStorage) -> Watched:
        """`tensor`, which lies in `storage`, is saved: a handle that may send its bytes away."""
        handle = Watched(tensor)
        known = self._saved.get(storage._cdata)
        if known is None or not known.lives or known.away is not None:
            known = self._saved[storage._cdata] = Saved(storage._cdata, storage.nbytes())
            self._saved.move_to_end(storage._cdata)
            self._here.pop(storage._cdata, None)
            self._here[storage._cdata] = known
        known.handles.append(weakref.ref(handle))
        return handle

    def is_asked_for(self, handle: Watched) -> bool:
        """It is, and will not be sent back. Had it been brought back before?"""
        return self._ahead.pop(id(handle.away), None) is not None

    def look_ahead(self, room_bytes: int) -> None:
        """Those that were saved last are asked for next: start to bring a few back, if there is room."""
        left = _AHEAD
        for saved in reversed(self._saved.values()):
            content = saved.away() if saved.away is not None else None
            if (
                content is None
                or content.here is not None
                or not any(not each.served for each in saved.living())
            ):
                continue
            if left == 0 or saved.size_bytes > room_bytes // 2:
                return
            content.prefetch()
            room_bytes, left = room_bytes - saved.size_bytes, left - 1
            if content.here is not None:
                self._ahead[id(content)] = content
                if self._is_cpu:
                    self._live.met(content.here)

    def send_back(self) -> None:
        """What came back before anybody has asked for it leaves again. Of a graph that nobody calls backward on nobody will."""
        while self._ahead:
            self._ahead.popitem()[1].send_back()

    def send(self, over_bytes: int) -> int:
        """Send so many bytes away, those that were saved first, and wait until they are. How many of them there are still."""
        leaving: list[SwappedStorage] = []
        for saved in self._tried(over_bytes) if self._tier.failure is None else ():
            if over_bytes <= 0:
                break
            content = self._send(saved)
            if content is not None:
                leaving.append(content)
                over_bytes -= saved.size_bytes
        if not leaving and self._skips < 0:
            self._skips, self._in_vain_bytes = len(self._here) // _OTHERS, over_bytes
        for content in leaving:
            try:
                content.wait_until_away()
            except SwapFailed as error:
                without_frames(error)  # the ticket still has the bytes
        return over_bytes

    def new_iteration(self) -> None:
        """What ended with the one before is forgotten; graphs that live on stay known."""
        for address, saved in list(self._saved.items()):
            if not saved.lives:
                self._forget(address)
        self.send_back()

    def forget_all(self) -> None:
        self._saved.clear()
        self._here.clear()
        self._ahead.clear()

    def _tried(self, over_bytes: int) -> list[Saved]:
        """What may leave now, where so many bytes are to."""
        self._skips -= 1
        if self._skips < 0 or over_bytes > 2 * self._in_vain_bytes:
            self._skips = -1
            return list(self._here.values())
        return [*islice(reversed(self._here.values()), _NEWEST)][::-1]

    def _send(self, saved: Saved) -> SwappedStorage | None:
        """Start to move it, if only autograd holds it; None: it stays, or is gone."""
        if saved.is_held_by_others and not (self.values is not None and self.values.pins(saved.address)):
            return None
        handles = saved.living()
        if not handles:
            self._forget(saved.address)
            return None
        kept = {id(each.tensor): each for each in handles}
        pins = self.values.pins_of(storage_of(handles[0].tensor)) if self.values is not None else 0
        if storage_use_count(saved.address) > len(kept) + pins + 1:  # one is who asks
            return None
        if self._streams.why_keep(handles[0].tensor.device):
            return None
        try:
            use = Use(self._live) if self._is_cpu else None
            content = SwappedStorage(self._tier, storage_of(handles[0].tensor), use)
        except SwapFailed as error:
            without_frames(error)
            return None
        if use is not None:
            use.content = weakref.ref(content)
        if self.values is not None:
            self.values.is_swapped(handles[0].tensor, content)
        for handle in handles:
            handle.leave(content)
        saved.away = weakref.ref(content)
        del self._here[saved.address]
        self.moved += 1
        self.moved_bytes += saved.size_bytes
        return content

    def _forget(self, address: int) -> None:
        """No handle on it lives any more."""
        self._saved.pop(address, None)
        self._here.pop(address, None)
