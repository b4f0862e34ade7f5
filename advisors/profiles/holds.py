"""What holds a peak, and what would move it: one line each, for a refusal.

The bytes on the device at one op, by kind; and for each kind that has a tenth of them what makes it smaller. Whether a smaller batch
is among that is not guessed: `elsewhere.batch` tells which storages grow with it.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.problem import Problem
from memopt.errors import NotPossibleHere
from memopt.estimators.elsewhere.batch import grows, recorded_batch
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import CATEGORIES, LEFT_OVER, PHASES, module_of_call
from memopt.units import format_bytes

STATE = ("parameter", "gradient", "optimizer state", "buffer")
_SHARE = 0.1
"""Of the peak, from which a kind of memory is worth a word."""
_NAMED = 3
"""Parts that are named one by one: a line for a screen."""
_NARROW = ("uint8", "int8")
"""Ends of the labels of state that has a byte to a number."""
_OF_ADAM = "exp_avg"
"""Begin of the labels of state that there is an 8-bit optimizer for."""
_OF_THE_SCRIPT = "script · "
_DATA = "tensors there before the iteration, of no module or variable"
LESS = "less with "
OF_THE_STEP = "temporaries of the step"


class Hold:
    """What is on the device at `op` of a run without the storages `away`, which peaks at `peak_bytes` there."""

    def __init__(
        self, problem: Problem, op: int, peak_bytes: int, away: frozenset[int] = frozenset()
    ) -> None:
        self.problem, self.op, self.peak_bytes = problem, op, peak_bytes
        view = problem.view
        gone = Counter(int(view.size[s]) for s in away if view.left_until.get(s, -1) >= op)
        """Of what the iteration before has left."""
        self.storages = []
        for s, size in enumerate(view.size.tolist()):
            if s in away or not (view.birth[s] < op <= view.death[s] and size > 0):
                continue
            if gone[size] and view.trace.storage_label(s).startswith(LEFT_OVER):
                gone[size] -= 1
            else:
                self.storages.append(s)

    @cached_property
    def by_kind(self) -> Counter[str]:
        """Bytes by category; `working` is what the op itself takes."""
        view, kinds = self.problem.view, self.problem.view.trace.storages.category
        found: Counter[str] = Counter()
        for storage in self.storages:
            found[CATEGORIES[kinds[storage]]] += int(view.size[storage])
        found["working"] = int(view.extra[self.op]) if view.n else 0
        return found

    @property
    def phase(self) -> str:
        return PHASES[int(self.problem.view.phase[self.op])]

    @property
    def is_foreach(self) -> bool:
        """Does a list form of the optimizer run, whose temporaries are as large as all parameters?"""
        return self.phase == "optimizer" and "_foreach_" in self.problem.view.trace.op_name(self.op)

    @cached_property
    def growing_bytes(self) -> int:
        """What of it follows the batch size."""
        view, follows = self.problem.view, _follows_the_batch((self.problem.instead_of or self.problem).view)
        found = sum(int(view.size[s]) for s in self.storages if follows[s])
        named = (
            [view.value_storage[v] for v in (*view.reads[self.op], *view.writes[self.op])] if view.n else []
        )
        if self.phase in ("forward", "backward") and any(follows[s] for s in named):
            found += self.by_kind["working"]
        return found

    def held_by(self) -> str:
        """`held by parameters 512 KiB, fc · addmm 96 KiB, the op itself 292 KiB: backward of conv2`."""
        view, trace = self.problem.view, self.problem.view.trace
        kinds = trace.storages.category
        parts = [(self.by_kind[name], name if name == "optimizer state" else name + "s") for name in STATE]
        others: dict[str, list[int]] = {}
        for s in self.storages:
            if CATEGORIES[kinds[s]] not in STATE:
                of_the_step = view.birth[s] >= 0 and PHASES[int(view.phase[view.birth[s]])] == "optimizer"
                name = OF_THE_STEP if of_the_step else self._name_of(s)
                others.setdefault(name, []).append(int(view.size[s]))
        for name, sizes in others.items():
            several = len(sizes) > 1 and name != OF_THE_STEP
            parts.append((sum(sizes), f"{name} ×{len(sizes)}" if several else name))
        parts.append((self.by_kind["working"], "the op itself"))
        largest = sorted((part for part in parts if part[0]), key=lambda part: -part[0])[:_NAMED]
        said = ", ".join(f"{name} {format_bytes(size)}" for size, name in largest)
        return (
            f"held by {said}: {place_of(self.problem, self.op, op_name=False)}"
            if view.n
            else f"held by {said}"
        )

    def _name_of(self, storage: int) -> str:
        """Where it comes from, without its shape; the line, where no module tells."""
        trace = self.problem.view.trace
        name = _without_shape(trace.storage_label(storage))
        if name == LEFT_OVER and CATEGORIES[trace.storages.category[storage]] != "activation":
            return _DATA
        line = trace.strings[trace.storages.line[storage]] if name.startswith(_OF_THE_SCRIPT) else ""
        return f"{name} at {line}" if line else name

    @property
    def _unread_bytes(self) -> int:
        """Of parameters that no op of the iteration reads."""
        view, kinds = self.problem.view, self.problem.view.trace.storages.category
        read = {view.value_storage[value] for values in view.reads for value in values}
        return sum(int(view.size[s]) for s in self.storages if CATEGORIES[kinds[s]] == "parameter" and s not in read)  # fmt: skip

    @property
    def _with_less(self) -> str:
        """Optimizers that have less state than this one."""
        view, kinds = self.problem.view, self.problem.view.trace.storages.category
        state = [s for s in self.storages if CATEGORIES[kinds[s]] == "optimizer state"]
        if not any(view.trace.storage_label(s).startswith(_OF_ADAM) for s in state):
            return "SGD"
        narrow = [s for s in state if view.trace.storage_label(s).endswith(_NARROW)]
        is_narrow = 2 * int(view.size[narrow].sum()) > int(view.size[state].sum())
        return "SGD" if is_narrow else "8-bit Adam, SGD"

    def moved_by(self) -> str:
        """What makes it smaller, the most bytes first; empty where nothing stands out."""
        kinds, allow = self.by_kind, self.problem.allow
        unread_bytes = self._unread_bytes
        found: list[tuple[int, str]] = [
            (
                kinds["parameter"] - unread_bytes,
                "parameters in fewer bits or sharded over devices (fully_shard)",
            ),
            (
                unread_bytes,
                f"modules deleted whose parameters ({format_bytes(unread_bytes)}) nothing in the iteration reads, unless others do (an average of weights)",
            ),
            (kinds["optimizer state"], f"an optimizer with less state ({self._with_less}: other results)"),
            (self.growing_bytes, "a smaller batch"),
        ]
        if self.is_foreach:
            found.append((kinds["temporary"] + kinds["working"], "fused=True in the optimizer"))
        if "optimizer" not in allow:
            found.append((kinds["gradient"], "--allow optimizer (its step inside backward)"))
        elif self.problem.instead_of is None and (why := self.problem.view.stays_after_backward):
            found.append((kinds["gradient"], f"the optimizer's step inside backward, but {why}"))
        if DEFAULT_ALLOW - allow - {"optimizer"}:
            found.append((self.peak_bytes, "fewer kinds of action denied"))
        worth = sorted((pair for pair in found if pair[0] >= _SHARE * self.peak_bytes), key=lambda p: -p[0])
        return f"{LESS}{'; '.join(words for _, words in worth[:_NAMED])}" if worth else ""


def _follows_the_batch(view: TraceView) -> list[bool]:
    """Per storage. Found once for a run, and for those that it may become, which have the same storages."""
    found: list[bool] | None = view.shared.get("follows the batch")
    if found is None:
        trace = view.trace
        try:
            found = grows(trace, recorded_batch(trace))
        except NotPossibleHere:  # the profile does not tell its batch size
            state = {CATEGORIES.index(name) for name in STATE}
            found = [kind not in state for kind in trace.storages.category]
        view.shared["follows the batch"] = found
    return found


def _without_shape(label: str) -> str:
    """`fc · addmm` of `fc · addmm · 4×1024 fp32`."""
    parts = label.split(" · ")
    return " · ".join(parts[:-1] or parts)


def place_of(problem: Problem, op: int, *, op_name: bool = True) -> str:
    """`backward of layers.0.conv1 (aten.convolution_backward.default)`."""
    trace = problem.view.trace
    where = module_of_call(trace.strings[trace.ops.module[op]].lstrip("@")) or "the script"
    phase = PHASES[int(problem.view.phase[op])]
    named = f" ({trace.op_name(op)})" if op_name else ""
    if phase == "optimizer":  # an op there is of all that it steps
        return f"the optimizer's step{named}"
    return f"{phase if phase != 'other' else 'an op'} of {where}{named}"
