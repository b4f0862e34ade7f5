"""Disk tiers that fail as disks do."""

from __future__ import annotations

from typing import Any

import torch

from memopt.enforcers.tiers.disk import DiskStore
from memopt.enforcers.tiers.swap import SwapFailed


class Full(DiskStore):
    """A disk that is full after so many writes."""

    left = 5

    def write_async(self, storage: torch.UntypedStorage, over: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            self.failure = self.failure or SwapFailed("the disk is full")
        return super().write_async(storage, over)
