"""Settings of the CUDA caching allocator, read from text as `PYTORCH_ALLOC_CONF` writes them.

The grammar and its limits follow `c10/core/AllocatorConfig` and `c10/cuda/CUDAAllocatorConfig` (torch 2.9 to 2.13):
`name:value` pairs divided by commas; a list in brackets for `roundup_power2_divisions`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from memopt.errors import UsageError

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
"""Rounded requests up to this size live in the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_REQUEST_BYTES = 10 * MIB
"""Requests below it share large segments; the others get one to measure, in steps of 2 MiB."""
SEGMENT_STEP_BYTES = 2 * MIB
UNLIMITED_BYTES = 1 << 62
"""A `max_split_size` that never binds."""
DIVISION_INTERVALS = 16
"""`roundup_power2_divisions` has one entry for each power of two from 1 MiB up to 32 GiB, the last one also for all above."""

_TRY = "expandable_segments:True, max_split_size_mb:128 or roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What `PYTORCH_ALLOC_CONF` can change of where blocks lie. The defaults are PyTorch's."""

    expandable_segments: bool = False
    max_split_size_bytes: int = UNLIMITED_BYTES
    """Blocks of this size or more are never split, and smaller requests never get one."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """How much larger than an oversize request the cached block that serves it may be."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS
    """For each power of two from 1 MiB up: into how many parts the span to the next one is divided; 0 or 1 is off."""
    garbage_collection_threshold: float = 0.0
    """Share of the limit above which old cached blocks are given back before a new segment is asked for; 0 is off, and so
    is a limit that no memory fraction set."""
    large_segment_size_bytes: int = 20 * MIB
    """Segment for requests over 1 MiB and below 10 MiB, and the page of large expandable segments (torch >= 2.11)."""
    per_process_memory_fraction: float = 1.0
    """Share of the device's memory that this process may reserve; 1 is no limit of its own."""

    def limit_bytes(self, memory_bytes: int) -> int | None:
        """What the process may reserve of a device's `memory_bytes`; None where no fraction was set."""
        share = self.per_process_memory_fraction
        return None if share == 1 else int(share * memory_bytes)

    @property
    def collects(self) -> bool:
        """Whether garbage is collected: PyTorch does so only where a memory fraction was set."""
        return self.garbage_collection_threshold > 0 and self.per_process_memory_fraction < 1


def parse_settings(text: str) -> AllocatorSettings:
    """The settings that `text` sets (`"expandable_segments:True,max_split_size_mb:128"`); an empty text is the default.

    Names that change nothing of the device's layout (pinned host memory, locks) are accepted and have no effect.
    Raises `UsageError` for an unknown name, a value out of range, or the backend `cudaMallocAsync`.
    """
    settings = AllocatorSettings()
    # As in PyTorch, the large segment's size comes first: other sizes are checked against it wherever they stand.
    for name, value in sorted(_pairs(text), key=lambda pair: pair[0] != "large_segment_size_mb"):
        settings = _with(settings, name, value)
    return settings


def round_request(size_bytes: int, settings: AllocatorSettings) -> int:
    """The size of the block that is looked for: up to 512 bytes, or up to a division between powers of two."""
    if size_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = settings.roundup_power2_divisions[min(max(size_bytes.bit_length() - 21, 0), 15)]
    if divisions <= 1 or size_bytes <= MIN_BLOCK_BYTES * divisions:
        return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    if size_bytes & (size_bytes - 1) == 0:
        return size_bytes
    step = (1 << (size_bytes.bit_length() - 1)) // divisions
    return -(-size_bytes // step) * step


def segment_bytes(size_bytes: int, settings: AllocatorSettings) -> int:
    """What is asked of the driver for a block of (rounded) `size_bytes`."""
    if size_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < LARGE_REQUEST_BYTES:
        return settings.large_segment_size_bytes
    return -(-size_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def _pairs(text: str) -> list[tuple[str, str]]:
    """`name:value` pairs of `text`; commas inside brackets do not divide."""
    pairs, piece, depth = [], "", 0
    for letter in text + ",":
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter != "," or depth > 0:
            piece += letter
            continue
        if piece.strip():
            name, colon, value = piece.strip().partition(":")
            if not colon or not value.strip():
                raise _refused(f"'{piece.strip()}' has no value", "each setting is name:value")
            pairs.append((name.strip(), value.strip()))
        piece = ""
    if depth != 0:
        raise _refused(f"the brackets in '{text.strip()}' do not match", "a list is [256:1,512:2,>:8]")
    return pairs


def _with(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    match name:
        case "expandable_segments":
            return replace(settings, expandable_segments=_flag(name, value))
        case "max_split_size_mb":
            return replace(settings, max_split_size_bytes=_mib(name, value, settings))
        case "max_non_split_rounding_mb":
            return replace(settings, max_non_split_rounding_bytes=_mib(name, value, settings))
        case "large_segment_size_mb":
            return replace(settings, large_segment_size_bytes=_mib(name, value, None))
        case "roundup_power2_divisions":
            return replace(settings, roundup_power2_divisions=_divisions(value))
        case "garbage_collection_threshold":
            return replace(settings, garbage_collection_threshold=_share(name, value, whole=False))
        case "per_process_memory_fraction":
            return replace(settings, per_process_memory_fraction=_share(name, value, whole=True))
        case "backend":
            if value != "native":
                why = "only PyTorch's native caching allocator has rules that can be simulated"
                raise _refused(f"backend:{value} cannot be simulated", why)
            return settings
    if name in _WITHOUT_EFFECT:
        return settings
    near = difflib.get_close_matches(name, [*_NAMES, *_WITHOUT_EFFECT], 1)
    raise UsageError(
        f"'{name}' is not an allocator setting",
        why="PYTORCH_ALLOC_CONF knows " + ", ".join(_NAMES),
        try_=f"{near[0]}:VALUE" if near else _TRY,
    )


_NAMES = (
    "backend", "expandable_segments", "garbage_collection_threshold", "large_segment_size_mb",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "roundup_power2_divisions",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse", "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb",
    "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_use_background_threads",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register", "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom",
)  # fmt: skip


def _flag(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _refused(f"{name}:{value} is neither True nor False", "PyTorch spells them just so")
    return value == "True"


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 12):
        raise _refused(f"{name}:{value} is not a whole number", "it counts MiB or divisions")
    return int(value)


def _mib(name: str, value: str, settings: AllocatorSettings | None) -> int:
    """Bytes of a size that must not be below the large segment's as set so far; without settings, above 10 MiB."""
    number = _whole(name, value)
    least = LARGE_REQUEST_BYTES + MIB if settings is None else settings.large_segment_size_bytes
    if number * MIB < least:
        of_what = "more than the 10 MiB below which requests share a segment"
        why = "at least the size of a large segment" if settings else of_what
        raise _refused(f"{name}:{number} is too small", f"PyTorch wants at least {least // MIB}, {why}")
    return min(number * MIB, UNLIMITED_BYTES)


def _share(name: str, value: str, *, whole: bool) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not (0 < share < 1 or (whole and share == 1)):
        raise _refused(
            f"{name}:{value} is out of range",
            "it must be above 0 and " + ("at most 1" if whole else "below 1"),
        )
    return share


def _divisions(value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_power_of_two(value, zero=False),) * DIVISION_INTERVALS
    if not value.endswith("]"):
        raise _refused(
            f"roundup_power2_divisions:{value} is not a list", "it is one number or [256:1,512:2,>:8]"
        )
    return _division_list(value[1:-1])


def _division_list(inside: str) -> tuple[int, ...]:
    """As PyTorch fills its table: the first entry counts for all below it, `>` for all above the last."""
    table = [0] * DIVISION_INTERVALS
    last, first = 0, True
    for piece in inside.split(","):
        bound, colon, divisions_text = (part.strip() for part in piece.partition(":"))
        if not colon:
            raise _refused(
                f"'{piece.strip()}' in roundup_power2_divisions is not MIB:DIVISIONS", "as in 256:4"
            )
        divisions = _power_of_two(divisions_text)
        if bound == ">":
            table[last + 1 :] = [divisions] * (DIVISION_INTERVALS - last - 1)
            continue
        index = min(_power_of_two(bound, zero=False).bit_length() - 1, DIVISION_INTERVALS - 1)
        if first:
            table[:index], first = [divisions] * index, False
        table[index] = divisions
        last = index
    return tuple(table)


def _power_of_two(value: str, *, zero: bool = True) -> int:
    number = _whole("roundup_power2_divisions", value)
    if number & (number - 1) or (number == 0 and not zero):
        raise _refused(
            f"roundup_power2_divisions: {number} is not a power of two", "sizes and divisions must be"
        )
    return number


def _refused(what: str, why: str) -> UsageError:
    return UsageError(what, why=why, try_=_TRY)
