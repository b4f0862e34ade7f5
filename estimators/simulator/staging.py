"""What copies to and from a tier take of the cores that compute: something on a CPU only."""

from __future__ import annotations

from memopt.device import Device
from memopt.estimators.simulator.sums import on_grid

HANDOVER_MS = 0.5
"""Per copy to or from the disk tier of a CPU: what its threads cost the kernels, which wait for the core and the interpreter's lock that
such a thread holds. Fitted, with `ONE_CORE`, to the swaps of three examples on two cores; their own time hides behind other ops."""
ONE_CORE = 2.0
"""Times as long as the kernels' own copy, on all cores, takes a thread of the tier."""


def staging_ms(size_bytes: int, device: Device) -> float:
    """What one copy to or from a tier takes of the cores that compute; 0 but on a CPU."""
    if device.kind != "cpu" or device.copy_bytes_per_s <= 0:
        return 0.0
    return on_grid(HANDOVER_MS + ONE_CORE * size_bytes / device.copy_bytes_per_s * 1000)
