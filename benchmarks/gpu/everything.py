"""A plan that takes every action of one kind that it can: `python -m benchmarks.gpu.everything PROFILE KIND PLAN`.

Such plans are no good; they show whether the mechanisms are right. KIND: recompute, swap-host, swap-disk, compress, mixed;
weights: those that can leave, to the host; one: a single recompute.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec

from benchmarks.gpu.jobs import dry
from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.estimators.simulator.decision import Decision
from memopt.trace import load_trace


def decisions(problem: Problem, kind: str) -> Decisions:
    """For each storage its action of `kind`; `mixed`: one of all its actions, or none."""
    if kind == "one":
        return dict([*decisions(problem, "recompute").items()][:1])
    if kind == "weights":
        away = decisions(problem, "swap-host")
        return {s: decision for s, decision in away.items() if problem.candidates[s].saved.is_weight}
    draw = random.Random(0)
    chosen = {}
    for storage, candidate in problem.candidates.items():
        swaps = [
            Decision(kind="swap", tier=tier) for tier in ("host", "disk") if kind in (f"swap-{tier}", "mixed")
        ]  # type: ignore[arg-type]
        if problem.view.trace.device.kind == "cpu" and not dry():
            swaps = [each for each in swaps if each.tier == "disk"]
        others = [option for option in candidate.options if kind in (option.kind, "mixed")]
        options: list[Decision | None] = [*swaps, *(each for each in others if each.kind != "swap")]
        if kind == "compress":
            options += [option for option in candidate.options if option.kind == "drop"]
        if kind == "mixed":
            options.append(None)
        picked = draw.choice(options) if options else None
        if picked is not None:
            chosen[storage] = picked
    return chosen


def main() -> None:
    profile, kind, plan = sys.argv[1:]
    trace = load_trace(Path(profile))
    if dry():  # beside a late device there are links
        links = ("host_out_bytes_per_s", "host_in_bytes_per_s", "disk_out_bytes_per_s", "disk_in_bytes_per_s")
        device = msgspec.structs.replace(trace.device, **dict.fromkeys(links, 1e10))
        trace = msgspec.structs.replace(trace, device=device)
    adviser = Adviser(trace, allowed((), ()))
    problem = adviser.problem(1)
    adviser.write(problem, decisions(problem, kind), f"all that can be: {kind}").save(Path(plan))


if __name__ == "__main__":
    main()
