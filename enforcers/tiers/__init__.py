"""The tiers that storages are swapped to: the host arena, the disk file, and what a device is asked for."""
