"""A slow checker of schedules, written from `docs/formats.md` alone. Shares no code with memopt: it reads plain JSON dicts.

It keeps every in-flight copy in one event list and re-adds the bytes on the device from scratch at each step.
Where the form leaves room it takes the strict reading.
"""

from __future__ import annotations

import heapq
from fractions import Fraction
from typing import Any


class Wrong(AssertionError):
    """The schedule breaks a rule."""


def check(graph: dict[str, Any], schedule: dict[str, Any]) -> dict[str, float]:
    """Peak and overhead of a schedule; `Wrong` when it is not valid."""
    size = {t["id"]: t["bytes"] for t in graph["tensors"]}
    resident = {t["id"] for t in graph["tensors"] if t.get("resident")}
    ops = graph["ops"]
    budget = schedule["budget_bytes"]
    here = dict.fromkeys(resident, "whole")
    arrives: dict[int, Fraction] = {}
    leaves: list[tuple[Fraction, int]] = []
    host: dict[int, Fraction] = {}
    clock = out_lane = in_lane = Fraction(0)
    peak = 0
    ran = [0] * len(ops)

    def on_device() -> int:
        return sum(size[t] for t in here)

    def settle(now: Fraction) -> None:
        while leaves and leaves[0][0] <= now:
            del here[leaves.pop(0)[1]]

    def note(extra: int, what: str) -> None:
        nonlocal peak
        if on_device() + extra > budget:
            raise Wrong(f"{what}: {on_device() + extra} > {budget}")
        peak = max(peak, on_device() + extra)

    note(0, "start")
    for verb, what in schedule["steps"]:
        if verb == "run":
            op = ops[what]
            if not ran[what] and not all(ran[:what]):
                raise Wrong(f"first run of {what} is out of order")
            if ran[what] and not op.get("replayable", True):
                raise Wrong(f"{what} ran twice")
            start = clock
            for t in op["reads"]:
                if here.get(t) != "whole":
                    raise Wrong(f"{what} reads {t}: {here.get(t)}")
                start = max(start, arrives.get(t, start))
            settle(start)
            extra = sum(size[t] for t in op["writes"]) + op.get("workspace_bytes", 0)
            while on_device() + extra > budget and leaves:
                start = max(start, leaves[0][0])
                settle(start)
            note(extra, f"run {what}")
            for t in op["writes"]:
                if here.setdefault(t, "whole") != "whole":
                    raise Wrong(f"{what} writes {t} while it leaves")
            ran[what] += 1
            clock = start + Fraction(op["ms"])
        elif verb == "free":
            if what in resident or here.get(what) != "whole" or arrives.get(what, clock) > clock:
                raise Wrong(f"free {what}")
            del here[what]
        elif verb == "out":
            if what in resident or here.get(what) != "whole" or arrives.get(what, clock) > clock:
                raise Wrong(f"out {what}")
            out_lane = max(out_lane, clock) + Fraction(size[what]) / Fraction(schedule["out_gbps"] * 1e6)
            here[what] = "leaving"
            host[what] = out_lane
            leaves.append((out_lane, what))
        elif verb == "in":
            settle(clock)
            if what in here or what not in host:
                raise Wrong(f"in {what}")
            here[what] = "whole"
            note(0, f"in {what}")
            in_lane = max(in_lane, clock, host[what]) + Fraction(size[what]) / Fraction(
                schedule["in_gbps"] * 1e6
            )
            arrives[what] = in_lane
        else:
            raise Wrong(f"step {verb}")
    if not all(ran):
        raise Wrong("an op never ran")
    for t in graph.get("keep", []):
        if here.get(t) != "whole":
            raise Wrong(f"kept {t} is {here.get(t)}")
        clock = max(clock, arrives.get(t, clock))
    plain = sum((Fraction(op["ms"]) for op in ops), Fraction(0))
    return {"peak_bytes": peak, "overhead": float(clock / plain - 1) if plain else 0.0}


def unplanned(graph: dict[str, Any]) -> int:
    """Peak without a plan, from the definition."""
    last: dict[int, int] = {}
    for position, op in enumerate(graph["ops"]):
        for t in [*op["writes"], *op["reads"]]:
            last[t] = position
    for t in graph.get("keep", []):
        last[t] = len(graph["ops"])
    here = {t["id"]: t["bytes"] for t in graph["tensors"] if t.get("resident")}
    pinned = set(here)
    size = {t["id"]: t["bytes"] for t in graph["tensors"]}
    peak = sum(here.values())
    for position, op in enumerate(graph["ops"]):
        here.update({t: size[t] for t in op["writes"]})
        peak = max(peak, sum(here.values()) + op.get("workspace_bytes", 0))
        for t in [*op["writes"], *op["reads"]]:
            if last[t] == position and t not in pinned:
                here.pop(t, None)
    return peak


def cheapest(graph: dict[str, Any], budget: int, most_runs: int) -> float | None:
    """Least recompute time of any schedule without copies and with at most `most_runs` runs, by exhaustive search over device contents.

    Nothing is freed before an op needs its room, and then no more than it needs: a schedule that frees more can free that much later, and
    whatever it runs can run beside what it would have freed. What no run to come can have a use for is freed at once.
    """
    size = {t["id"]: t["bytes"] for t in graph["tensors"]}
    resident = frozenset(t["id"] for t in graph["tensors"] if t.get("resident"))
    ops = graph["ops"]
    reads = [frozenset(op["reads"]) - resident for op in ops]
    writes = [frozenset(op["writes"]) for op in ops]
    room = [
        budget - sum(size[t] for t in [*resident, *op["writes"]]) - op.get("workspace_bytes", 0) for op in ops
    ]
    keep = frozenset(graph.get("keep", [])) - resident
    wanted = [still_wanted(done, reads, writes, keep) for done in range(len(ops) + 1)]
    best: dict[tuple[int, frozenset[int]], float] = {}
    heap: list[tuple[float, int, int, frozenset[int], int]] = [(0.0, 0, 0, frozenset(), 0)]
    tie = 0
    while heap:
        cost, _, done, here, runs = heapq.heappop(heap)
        if done == len(ops) and keep <= here:
            return cost
        if best.get((done, here), float("inf")) < cost - 1e-12 or runs >= most_runs:
            continue
        for index in range(min(done + 1, len(ops))):
            first = index == done
            if not reads[index] <= here or not (first or ops[index].get("replayable", True)):
                continue
            price = cost + (0.0 if first else ops[index]["ms"])
            for kept in fitting(here, reads[index], room[index], size):
                state = (done + first, (kept | writes[index]) & wanted[done + first])
                if price < best.get(state, float("inf")) - 1e-12:
                    best[state] = price
                    tie += 1
                    heapq.heappush(heap, (price, tie, *state, runs + 1))
    return None


def still_wanted(
    done: int, reads: list[frozenset[int]], writes: list[frozenset[int]], keep: frozenset[int]
) -> frozenset[int]:
    """What the ops from `done` on read, or is kept, and whatever these tensors can be made again from."""
    found: set[int] = set()
    todo = list(keep.union(*reads[done:]))
    while todo:
        tensor = todo.pop()
        if tensor not in found:
            found.add(tensor)
            todo += [t for r, w in zip(reads, writes, strict=True) if tensor in w for t in r]
    return frozenset(found)


def fitting(
    here: frozenset[int], reads: frozenset[int], room: int, size: dict[int, int]
) -> list[frozenset[int]]:
    """The largest subsets of `here` with all of `reads` that fit into `room`: each lacks nothing that would fit beside the rest."""
    over = sum(size[t] for t in here) - room
    found: list[frozenset[int]] = []

    def free(gone: list[int], left: int, rest: list[int]) -> None:
        if left > 0:
            for position, tensor in enumerate(rest):
                free([*gone, tensor], left - size[tensor], rest[position + 1 :])
        elif all(left + size[t] > 0 for t in gone):
            found.append(here.difference(gone))

    free([], over, sorted(here - reads))
    return found
