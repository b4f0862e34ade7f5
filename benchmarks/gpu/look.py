"""Where the time of a few steps goes: `train.py --look python` by functions of Python, `--look device` by streams and CUDA's calls."""

from __future__ import annotations

import cProfile
import time
from collections import Counter
from typing import Any

import torch

STEPS = range(6, 10)
"""Those that are looked at: the plan has been enforced for a while, and all kernels are loaded."""
_MOST = 80
"""So many functions are told."""
Found = dict[str, Any]


class Device:
    """torch's profiler: how busy each stream is, and which calls of CUDA's runtime take how long."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        cuda = torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
        self._begin = 0.0

    def begin(self) -> None:
        self._profile.__enter__()
        self._begin = time.perf_counter()

    def end(self) -> Found:
        wall = time.perf_counter() - self._begin
        self._profile.__exit__(None, None, None)
        calls: dict[str, list[float]] = {}
        streams: dict[int, list[tuple[int, int, str]]] = {}
        for event in self._profile.profiler.kineto_results.events():  # type: ignore[union-attr]
            name, nanoseconds = event.name(), event.duration_ns()
            if event.device_type() == torch.autograd.DeviceType.CUDA:
                streams.setdefault(event.device_resource_id(), []).append(
                    (event.start_ns(), nanoseconds, name)
                )
            elif name.startswith(("cu", "aten::_to_copy")):
                count_ms = calls.setdefault(name, [0, 0.0, 0.0])
                count_ms[0] += 1
                count_ms[1] += nanoseconds / 1e6
                count_ms[2] = max(count_ms[2], nanoseconds / 1e6)
        return {
            "wall_ms": wall * 1e3,
            "calls": {name: [n, round(ms, 2), round(most, 2)] for name, (n, ms, most) in sorted(calls.items(), key=lambda each: -each[1][1])},
            "streams": {stream: _busy(events) for stream, events in streams.items()},
        }  # fmt: skip


def _busy(events: list[tuple[int, int, str]]) -> Found:
    """How long a stream worked, from its first event to its last, and what took longest."""
    events.sort()
    kinds: Counter[str] = Counter()
    gaps = []
    for (start, nanoseconds, name), after in zip(events, [*events[1:], None], strict=True):
        kinds[name[:60]] += nanoseconds
        if after is not None and after[0] > start + nanoseconds:
            gaps.append(((after[0] - start - nanoseconds) / 1e6, name[:40], after[2][:40]))
    gaps.sort(reverse=True)
    return {
        "events": len(events),
        "busy_ms": round(sum(kinds.values()) / 1e6, 2),
        "from_to_ms": round((events[-1][0] + events[-1][1] - events[0][0]) / 1e6, 2),
        "most": [(name, round(nanoseconds / 1e6, 2)) for name, nanoseconds in kinds.most_common(6)],
        "gaps": [len(gaps), *((round(ms, 2), before, after) for ms, before, after in gaps[:8])],
    }


class Python:
    """cProfile: which functions of Python, and which that it calls, take how long, each without those that it calls itself."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def begin(self) -> None:
        self._profile.enable()

    def end(self) -> Found:
        self._profile.disable()
        found = []
        for entry in self._profile.getstats():
            code = entry.code
            name = (
                code
                if isinstance(code, str)
                else f"{'/'.join(code.co_filename.split('/')[-2:])} {code.co_qualname}"
            )
            found.append(
                (round(entry.inlinetime * 1e3, 2), round(entry.totaltime * 1e3, 2), entry.callcount, name)
            )
        return {"functions": sorted(found, reverse=True)[:_MOST]}  # fmt: skip


LOOKS = {"python": Python, "device": Device}
