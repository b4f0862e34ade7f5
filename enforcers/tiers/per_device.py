"""One store for each device that storages are swapped from, opened when the first one leaves.

Not sooner: at the import of torch no rank has chosen its device yet, and to ask for one would make a context on the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.enforcers.tiers.swap import Pending, SwapFailed, SwapTier, without_frames

if TYPE_CHECKING:
    import torch

OpenStore = Callable[["torch.device"], SwapTier[Any]]
"""Device -> a store for its storages. Raises `SwapFailed` where there can be none."""


class PerDevice:
    """A tier made of one store per `storage.device`."""

    def __init__(self, open_store: OpenStore) -> None:
        self._open = open_store
        self._stores: dict[torch.device, SwapTier[Any]] = {}
        self.stores: tuple[SwapTier[Any], ...] = ()
        """Those that are open; another thread may open one meanwhile."""
        self._refused: dict[torch.device, SwapFailed] = {}
        self._lock = threading.Lock()

    @property
    def failure(self) -> SwapFailed | None:
        """The first thing that went wrong on any device."""
        failed = [*self._refused.values(), *(store.failure for store in self.stores)]
        return next((failure for failure in failed if failure is not None), None)

    @property
    def frees_nothing(self) -> str:
        """Why what was moved there has freed nothing; empty where it has."""
        return next((why for store in self.stores if (why := store.frees_nothing)), "")

    def write_async(self, storage: torch.UntypedStorage, over: Any = None) -> Any:
        """As the device's own store; raises `SwapFailed` where that could not be opened."""
        return self._store(storage.device).write_async(storage, over)

    def read_async(self, ticket: Any, into: torch.UntypedStorage) -> Pending:
        return self._stores[ticket.device].read_async(ticket, into)

    def read_part(self, ticket: Any, begin: int, into: torch.UntypedStorage) -> Pending:
        return self._stores[ticket.device].read_part(ticket, begin, into)

    def wait(self, ticket: Any) -> None:
        self._stores[ticket.device].wait(ticket)

    def take_back(self, ticket: Any) -> torch.UntypedStorage | None:
        return self._stores[ticket.device].take_back(ticket)

    def collect(self) -> int:
        return sum([store.collect() for store in self.stores])

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def _store(self, device: torch.device) -> SwapTier[Any]:
        known = self._stores.get(device)
        if known is not None:
            return known
        with self._lock:
            if device in self._refused:
                raise self._refused[device].again()
            if device not in self._stores:
                self._stores[device] = self._opened(device)
                self.stores = (*self._stores.values(),)
            return self._stores[device]

    def _opened(self, device: torch.device) -> SwapTier[Any]:
        try:
            return self._open(device)
        except Exception as error:
            known = error if isinstance(error, SwapFailed) else None
            failed = known or SwapFailed(f"no tier could be opened for {device}", why=str(error))
            self._refused[device] = failed
            without_frames(failed)
            raise failed.again() from None


def disk_tier(folder: Path) -> PerDevice:
    """Swap files in `folder`."""
    return PerDevice(lambda device: _disk_store(folder, device))


def host_tier(at_once_bytes: int) -> PerDevice:
    """Pinned memory of the host, `at_once_bytes` of it for each device from the beginning."""
    return PerDevice(lambda device: _host_store(at_once_bytes, device))


def offload_tier(folder: Path) -> PerDevice:
    """The host for what an accelerator holds, a swap file in `folder` for what the host does."""
    return PerDevice(
        lambda device: _disk_store(folder, device) if device.type == "cpu" else _host_store(0, device)
    )


def _disk_store(folder: Path, device: torch.device) -> SwapTier[Any]:
    from memopt.enforcers.tiers.accelerator import accelerator_of
    from memopt.enforcers.tiers.disk import DiskStore

    return DiskStore(folder, accelerator=accelerator_of(device))


def _host_store(at_once_bytes: int, device: torch.device) -> SwapTier[Any]:
    from memopt.enforcers.tiers.accelerator import TorchAccelerator, accelerator_of
    from memopt.enforcers.tiers.host import HostStore

    return HostStore(at_once_bytes, accelerator=accelerator_of(device) or TorchAccelerator(device))
