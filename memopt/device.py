"""Device: what the planner must know of the machine that a script trains on. Measured at profile time, or from a table."""

from __future__ import annotations

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device and its links. Bytes are bytes, rates are bytes per second, 0 means not known or not there."""

    kind: str = "cpu"
    """`cpu`, `cuda`, ... as in `torch.device.type`."""
    name: str = ""
    memory_bytes: int = 0
    """All memory of the device; on a CPU the machine's RAM."""
    context_bytes: int = 0
    """Memory outside the allocator that the process holds there (CUDA context, kernels)."""
    host_out_bytes_per_s: float = 0.0
    """Device to pinned host memory."""
    host_in_bytes_per_s: float = 0.0
    disk_out_bytes_per_s: float = 0.0
    """Writing to the swap directory."""
    disk_in_bytes_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    """Reading and writing device memory at once (a large `copy_`)."""
    allocator: str = ""
    """Kind and settings, as PYTORCH_ALLOC_CONF writes them."""
    modelled: bool = False
    """Rates and op times come from a table, not from a measurement."""

    def rates_of(self, tier: str | None) -> tuple[float, float]:
        """Bytes per second out to `host` or `disk`, and back."""
        if tier == "host":
            return self.host_out_bytes_per_s, self.host_in_bytes_per_s
        return self.disk_out_bytes_per_s, self.disk_in_bytes_per_s
