"""Swapped storages: copied out after their forward consumer, copied in at the plan's trigger or when they are asked for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import UntypedStorage

from memopt.enforcers.tiers.swap import Pending, SwapFailed, SwapTier, without_frames
from memopt.instrument.script.forks import bring_back_before_forks

if TYPE_CHECKING:
    from memopt.enforcers.tiers.feedback import Feedback, Use


class Told(Protocol):
    """Who is told of how a storage comes back."""

    def begins(self) -> None:
        """The copy in is started."""

    def wait(self, arrival: Pending) -> None:
        """Wait for the copy."""


LEAST_BYTES = 1 << 20
"""Smaller storages are not worth the start of a copy and a place in a tier, under a plan or beside one."""


class SwappedStorage:
    """One storage that a tier holds, shared by all handles on it. Asked for by any thread: backward has one for each device."""

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_home",
        "_lock",
        "_storage",
        "_ticket",
        "_tier",
        "_use",
        "source",
        "waiting",
    )

    def __init__(self, tier: SwapTier[Any], storage: UntypedStorage, use: Told | None = None) -> None:
        """`use` is told of how it comes back."""
        self._tier, self._use = tier, use
        self._ticket = tier.write_async(storage)
        self._storage: UntypedStorage | None = None
        self._arrival: Pending | None = None
        self._home = False
        """The swap was called off: the bytes are here only."""
        self._lock = threading.RLock()
        self.source = weakref.ref(storage)
        self.waiting = 0
        """Handles that have not been served."""
        _living.add(self)

    def prefetch(self) -> None:
        """Start to bring it back; one that has not left yet just stays, one for which there is no room yet waits for `get`."""
        try:
            self._bring()
        except RuntimeError:  # out of memory: whoever needs it asks again, when more has been let go of
            self._tier.collect()

    @property
    def here(self) -> UntypedStorage | None:
        """What it has been brought back to, be it on its way."""
        return self._storage

    def send_back(self) -> None:
        """Take back a `prefetch`, where nobody has asked since: the tier still has the bytes."""
        with self._lock:
            if self._arrival is not None:
                self._arrival.result()
                self._storage = self._arrival = None

    def _bring(self) -> None:
        with self._lock:
            if self._storage is not None:
                return
            held = self._tier.take_back(self._ticket)
            if held is not None:
                self._storage = held
                self._home = True
                return
            if self._use is not None:
                self._use.begins()
            like = self._ticket
            storage = UntypedStorage(like.nbytes, device=like.device)
            self._arrival = self._tier.read_async(like, storage)
            self._storage = storage

    def wait_until_away(self) -> None:
        """Until the copy is safe. Raises `SwapFailed` if it failed; the storage is kept then."""
        if not self._home and self._storage is None:
            self._tier.wait(self._ticket)

    def get(self) -> UntypedStorage:
        """The storage with its bytes; waits for the copy, as does the stream of everybody who asks."""
        alive = self.source()
        if alive is not None:
            return alive
        self.prefetch()
        with self._lock:
            self._bring()
            arrival, storage = self._arrival, self._storage
        assert storage is not None
        if arrival is not None and self._use is not None:
            self._use.wait(arrival)
        elif arrival is not None:
            arrival.result()
        return storage

    def served(self) -> None:
        """One handle has been served; the device copy goes with the last one."""
        with self._lock:
            self.waiting -= 1
            if self.waiting <= 0 and not self._home:
                self._storage = self._arrival = None


_living: weakref.WeakSet[SwappedStorage] = weakref.WeakSet()
bring_back_before_forks(lambda: _living, SwappedStorage.get, SwapFailed, RuntimeError)
"""A child may go back through its parent's graph."""


class Away(Protocol):
    """What a plan's moments bring about."""

    def prefetch(self) -> None:
        """Start to bring it back."""

    def wait_until_away(self) -> None:
        """Until the copy out is safe; raises `SwapFailed`."""


class Swapper:
    """Tiers by name and what is swapped in this iteration."""

    def __init__(
        self,
        tiers: Mapping[str, SwapTier[Any]],
        tier_of_action: dict[int, str],
        feedback: Feedback | None = None,
    ) -> None:
        self._tiers = tiers
        self._tier_of = tier_of_action
        self.feedback = feedback
        self._swapped: dict[int, weakref.ref[Away]] = {}
        self._leaving: list[int] = []
        """Of these, what has been sent since all were waited for."""
        self.reason = "there is no place to swap to"
        self.failed: dict[int, str] = {}
        """Actions of this iteration whose copies could not be made, and why."""

    def swap_out(self, action: int, storage: UntypedStorage) -> SwappedStorage | None:
        """Start to swap `storage` out, or join the swap that another of its slots has started; None: keep it."""
        known = self._swapped.get(action)
        content = known() if known is not None else None
        if not isinstance(content, SwappedStorage) or content.source() is not storage:
            tier = self.tier_of(action)
            if tier is None:
                return None
            try:
                content = SwappedStorage(tier, storage, self.use_of(action, storage.nbytes()))
            except SwapFailed as error:
                self.reason = error.what
                without_frames(error)  # the tier remembers it
                return None
            self.joins(action, content)
        content.waiting += 1
        return content

    def tier_of(self, action: int) -> SwapTier[Any] | None:
        return self._tiers.get(self._tier_of.get(action, ""))

    def use_of(self, action: int, size_bytes: int) -> Use | None:
        """To be told of how a storage that leaves now comes back."""
        return self.feedback.use_of(action, size_bytes) if self.feedback is not None else None

    def joins(self, action: int, content: Away) -> None:
        """Something that has left in another way comes back by the same triggers."""
        self._swapped[action] = weakref.ref(content)
        self._leaving.append(action)

    def prefetch(self, actions: list[int]) -> None:
        """Start the swap-ins of `actions`."""
        for action in actions:
            reference = self._swapped.get(action)
            content = reference() if reference is not None else None
            if content is not None:
                content.prefetch()

    def wait_until_away(self, actions: Iterable[int]) -> None:
        """Let none of `actions` lag behind what was planned, on a disk that is slower now."""
        for action in actions:
            reference = self._swapped.get(action)
            content = reference() if reference is not None else None
            try:
                if content is not None:
                    content.wait_until_away()
            except SwapFailed as error:
                self.failed[action] = error.what
        self.collect()

    def wait_for_all(self) -> None:
        """As `wait_until_away`: the peak is near when backward begins, or the guard beside the plan needs room."""
        leaving, self._leaving = self._leaving, []
        self.wait_until_away(leaving)

    def collect(self) -> None:
        """Let go of what has safely been copied out. Asked after each op, of the one or two tiers that there are."""
        for tier in self._tiers.values():
            tier.collect()

    def failures(self) -> list[str]:
        """What went wrong, in words; what could not be copied was kept."""
        return [tier.failure.words for tier in self._tiers.values() if tier.failure is not None]

    def frees_nothing(self) -> list[str]:
        """Of which tier that is so, and why."""
        return [why for tier in self._tiers.values() if (why := tier.frees_nothing)]

    def new_iteration(self) -> None:
        self.failed.clear()
        self._swapped.clear()
        self._leaving.clear()
        self.collect()

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()
