"""Why this action and not another: what each option for one tensor would do to the plan."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.errors import UsageError
from memopt.estimators.simulator.decision import Decision
from memopt.trace import CATEGORIES

_MOST_OTHERS = 6
"""Numbers that are named one by one: a line for a screen."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One option for a tensor, judged with the rest of the plan as it is."""

    what: str
    peak_bytes: int
    step_ms: float
    fits: bool
    chosen: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """A tensor, the options for it, and why there are no more of them."""

    storage: int
    label: str
    size_bytes: int
    alternatives: tuple[Alternative, ...]
    reasons: tuple[str, ...]


def explain(problem: Problem, decisions: Decisions, tensor: str) -> Explanation:
    """What each option for `tensor` (its number, or a part of its label: the largest that matches) would do."""
    storage, *others = matching(problem, tensor)
    candidate = problem.candidates.get(storage)
    options = [None, *candidate.options] if candidate is not None else [None]
    chosen = decisions.get(storage)
    alternatives = tuple(_judge(problem, decisions, storage, option, chosen) for option in options)
    return Explanation(
        storage=storage,
        label=problem.view.trace.storage_label(storage),
        size_bytes=int(problem.view.size[storage]),
        alternatives=alternatives,
        reasons=(*why_not(problem, storage), *_of_others(tensor, others)),
    )


def _of_others(tensor: str, others: list[int]) -> list[str]:
    if not others:
        return []
    numbers = ", ".join(map(str, others[:_MOST_OTHERS])) + (" and more" if len(others) > _MOST_OTHERS else "")
    return [
        f"{len(others) + 1} tensors have '{tensor}' in their names; for another one --explain NUMBER: {numbers}"
    ]


def matching(problem: Problem, tensor: str) -> list[int]:
    """The storages that a person may mean, the likeliest first: one that can be acted on, and large. Raises `UsageError` when there is none."""
    trace = problem.view.trace
    if tensor.isdecimal() and int(tensor) < trace.storage_count:
        return [int(tensor)]
    words = tensor.lower().strip()
    found = [s for s in range(trace.storage_count) if words and words in trace.storage_label(s).lower()]
    if not found:
        raise UsageError(
            f"no tensor of the profile is called '{tensor}'",
            try_="a part of a name that memopt show PROFILE prints, or the number of the tensor",
        )
    return sorted(found, key=lambda s: (s not in problem.candidates, -int(problem.view.size[s])))


def _judge(
    problem: Problem, decisions: Decisions, storage: int, option: Decision | None, chosen: Decision | None
) -> Alternative:
    rest = {s: d for s, d in decisions.items() if s != storage}
    same = option is chosen is None or (
        option is not None and chosen is not None and (option.kind, option.tier) == (chosen.kind, chosen.tier)
    )
    trial = (
        decisions
        if same
        else place_prefetches(problem, rest if option is None else {**rest, storage: option})
    )
    timeline = problem.run(trial)
    return Alternative(_words(option), timeline.peak_bytes, timeline.step_ms, problem.fits(timeline), same)


def _words(option: Decision | None) -> str:
    if option is None:
        return "keep"
    if option.kind == "swap":
        return f"swap to {option.tier}"
    return f"compress ({option.codec})" if option.kind == "compress" else option.kind


def why_not(problem: Problem, storage: int) -> list[str]:
    """What stands against acting on `storage`; empty when everything can be done with it."""
    view = problem.view
    category = CATEGORIES[view.trace.storages.category[storage]]
    saved = view.saved.get(storage)
    if saved is None:
        held = (
            "is the script's own" if category == "input" else "is not among what autograd saved in this step"
        )
        return [f"it is a {category} and {held}: only tensors that autograd saves are acted on"]
    found = []
    if not saved.plain:
        found.append(
            "a tensor subclass, not strided, or saved again by a backward that makes a graph: memopt leaves those alone"
        )
    if saved.first_use >= view.n:
        found.append("backward never asked for it")
    if saved.gone_after + 1 >= min(saved.first_use, view.n):
        found.append("somebody other than autograd holds it until backward asks for it")
    candidate = problem.candidates.get(storage)
    if candidate is None and not found:
        found.append("it is too small to matter, or nothing that is allowed can be done with it")
    if candidate is not None and candidate.chain is None and "recompute" in problem.allow:
        found.append(
            "it cannot be recomputed: an op on the way may not run again, or a source is gone by then"
        )
    if candidate is not None and candidate.codec is None and "compress" in problem.allow:
        found.append("it cannot be compressed: backward reads its values")
    return found
