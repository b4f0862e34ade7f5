"""Lints: what no plan should have to fix, seen in one profiled iteration, each with its bytes and the line of code.

A rule looks at a trace and names storages; what is below a hundredth of the peak is not worth a word, unless it grows from step to step.
The rules are in `saved` (what a model saves) and `loop` (what the loop around it does); a new one is one function there.
How much of the host's pinned memory is lost to rounding is no rule: no trace tells it.
"""

from __future__ import annotations

from memopt.advisors.lints import saved as _saved  # noqa: F401  registers its rules: before those of `loop`, where two tie

# isort: split
from memopt.advisors.lints import loop as _loop  # noqa: F401
from memopt.advisors.lints.libraries import instead
from memopt.advisors.lints.registry import RULES, Lint, Seen
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import Trace

LEAST_SHARE = 0.01
"""Of the peak: what is less is not worth a word."""


def find_lints(trace: Trace) -> list[Lint]:
    """The findings in `trace`, the most bytes first."""
    seen = Seen(TraceView(trace))
    found = []
    for named in RULES:
        at_stake = dict.fromkeys(named.rule(seen))
        storages = [each for each in at_stake if isinstance(each, int)]
        lines = [each for each in at_stake if isinstance(each, str)]
        size = sum(int(seen.view.size[s]) for s in storages)
        least = 0 if named.any_size else max(1, LEAST_SHARE * trace.peak_bytes)
        if at_stake and size >= least:
            line = lines[0] if lines else seen.line_of(storages)
            found.append(Lint(named.name, size, line, named.what, instead(named.name, line, named.try_)))
    return sorted(found, key=lambda each: -each.size_bytes)
