"""`python -m benchmarks.op_samples`: every sample that torch has for testing its ops, plain against profiled and enforced, bit for bit.

Samples of torch's own OpInfo: float32, bfloat16 and complex64; outputs without gradients, also under autocast; outputs and
gradients, of in-place forms too; second derivatives. They run in loops of `--batch` samples: plain (twice; those that do not
repeat or raise are left out and counted), while they are recorded, and with every saved tensor recomputed, swapped,
compressed, or one of them by lot. Any difference is named, and is a bug; the exit code is 1 then.

`--kinds forward,autocast,gradients,in-place,second`, `--ops a,b`, `--seed`, `--most` samples of each op, kind and type.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memopt.advisors.profiles.problem import Decisions, Problem, may_act_on
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.decision import RECOMPUTE_AGAIN
from tests.support.enforced import SWAP, enforced, plan_of, recorded, seeded

WITHOUT_GRADIENTS = ("forward", "autocast")
KINDS = ("forward", "autocast", "gradients", "in-place", "second")
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
STEPS = 3
_SKIP = ("empty", "new_empty", "resize_", "resize_as_", "linalg.lstsq")
"""What they give depends on what the memory held before (`lstsq`: LAPACK's `gelsy` reads pivots that nobody sets)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of an op, and what is asked of it."""

    name: str
    kind: str
    call: Callable[..., Any]
    given: Any
    """(input, args, kwargs) as torch made them."""


class _Op(nn.Module):
    """A module of its own for each sample: one that is not as planned disturbs no other."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample

    def forward(self, given: Any) -> Any:
        first, args, kwargs = tree_map_only(Tensor, _made, given)
        return self.sample.call(first, *args, **kwargs)


def _made(tensor: Tensor) -> Tensor:
    """By an op, so that it can be made again, and written in place."""
    return tensor.clone() if tensor.requires_grad else tensor


@cache
def _ops() -> list[Any]:
    """What their import makes, a million objects, is left out where all objects are searched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    gc.collect()
    gc.freeze()
    return [info for info in op_db if not info.name.startswith(_SKIP)]


def op_names() -> list[str]:
    """Of all ops that torch has samples of, sorted."""
    return sorted({info.name for info in _ops()})


def samples(
    kinds: tuple[str, ...] = KINDS, ops: tuple[str, ...] = (), seed: int = 0, most: int = 10**6
) -> Iterator[Sample]:
    """Those of all ops, or of `ops`."""
    for info in _ops():
        if ops and info.name not in ops:
            continue
        for kind in kinds:
            for dtype in DTYPES:
                yield from _of(info, kind, dtype, seed, most)


def _of(info: Any, kind: str, dtype: torch.dtype, seed: int, most: int) -> Iterator[Sample]:
    grad = kind not in WITHOUT_GRADIENTS
    call = info.inplace_variant if kind == "in-place" else info.op
    if (
        not info.supports_dtype(dtype, "cpu")
        or call is None
        or (grad and not (info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")))
        or (kind == "in-place" and not info.supports_inplace_autograd)
        or (kind == "second" and not info.supports_gradgrad)
        or (kind == "autocast" and dtype is not torch.float32)
    ):
        return
    name = f"{info.name}{'.' if info.variant_test_name else ''}{info.variant_test_name}"
    torch.manual_seed(seed + zlib.crc32(name.encode()))
    try:
        found = list(info.sample_inputs("cpu", dtype, requires_grad=grad))
    except Exception:  # of torch's own samples some need what is not installed
        return
    if len(found) > most:
        found = random.Random(seed).sample(found, most)
    for number, each in enumerate(found):
        if kind == "in-place" and each.broadcasts_input:
            continue
        label = f"{name} {str(dtype).removeprefix('torch.')} {kind} {number}"
        yield Sample(label, kind, call, (each.input, each.args, each.kwargs))


def loop_of(
    chosen: list[Sample], tell: Callable[[list[str]], None] | None = None
) -> Callable[[int], list[str]]:
    """A training loop that runs all of them in each iteration; what it gives is one digest for each in each.

    `tell` is given those of an iteration as soon as they are there: a loop that is recorded is stopped before it gives any.
    """

    def loop(steps: int) -> list[str]:
        anchor = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))  # something is always enforced
        optimizer = torch.optim.SGD(anchor.parameters(), lr=0.1)
        ops = [_Op(sample) for sample in chosen]
        found = []
        for _ in range(steps):
            found.append([_digest_of(op) for op in ops])
            if tell is not None:
                tell(found[-1])
            optimizer.zero_grad()
            anchor(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return [each for row in found for each in row]

    return loop


def _digest_of(op: _Op) -> str:
    torch.manual_seed(1)
    try:
        return " ".join(each if isinstance(each, str) else digest(each) for each in _computed(op))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _computed(op: _Op) -> list[Tensor | str]:
    kind, given = op.sample.kind, tree_map_only(Tensor, _fresh, op.sample.given)
    if kind in WITHOUT_GRADIENTS:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            return [each if isinstance(each, Tensor) else repr(each) for each in tree_leaves(op(given))]
    outputs = [each for each in tree_leaves(op(given)) if isinstance(each, Tensor)]
    roots = [each for each in outputs if each.requires_grad]
    leaves = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.requires_grad]
    first = torch.autograd.grad(
        roots, leaves, [_cotangent(r) for r in roots], allow_unused=True, create_graph=kind == "second"
    )
    found = [*outputs, *(g for g in first if g is not None)]
    again = [g for g in first if g is not None and g.requires_grad]
    if again:
        second = torch.autograd.grad(again, leaves, [_cotangent(g) for g in again], allow_unused=True)
        found += [g for g in second if g is not None]
    return found


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _cotangent(tensor: Tensor) -> Tensor:
    steps = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
    return (steps % 7 - 2.5).to(tensor.dtype)


@dataclass(slots=True)
class Held:
    """What came of some samples."""

    compared: int = 0
    left_out: int = 0
    """They raise in the plain run, or do not repeat."""
    actions: int = 0
    """Taken, over all runs."""
    different: list[str] = field(default_factory=list)


def hold(chosen: list[Sample], folder: Path, held: Held) -> None:
    """Run `chosen` in every way; adds to `held`."""
    plain, again = (seeded(loop_of(chosen), STEPS) for _ in range(2))
    count = len(chosen)
    repeats = [
        all(plain[i] == plain[s * count + i] == again[s * count + i] for s in range(STEPS))
        and not _raised(plain[i])
        for i in range(count)
    ]
    kept = [sample for sample, good in zip(chosen, repeats, strict=True) if good]
    held.left_out += count - len(kept)
    held.compared += len(kept)
    if not kept:
        return
    expected = {s.name: value for s, value, good in zip(chosen, plain, repeats, strict=False) if good}

    def compare(how: str, values: list[str]) -> None:
        for sample, value in zip(kept * STEPS, values, strict=False):
            if value != expected[sample.name]:
                why = f": {value}"[:300] if _raised(value) else ""
                held.different.append(f"{sample.name}, {how}{why}")

    trace = recorded(loop_of(kept, lambda values: compare("profiled", values)), folder)
    loop = loop_of(kept)
    for how, choose in CHOICES.items():
        if kept[0].kind in WITHOUT_GRADIENTS and how not in ("recompute", "mix"):
            continue
        computed, outcome = enforced(loop, plan_of(trace, choose), folder, STEPS)
        compare(how, computed)
        held.actions += outcome.actions.done


def _raised(value: str) -> bool:
    return ": " in value


def _every(kind: str) -> Callable[[Problem], Decisions]:
    def choose(problem: Problem) -> Decisions:
        if kind == "swap":
            return {s: SWAP for s, saved in problem.view.saved.items() if may_act_on(problem.view, saved)}
        options = {c.storage: c.option(kind) for c in problem.movable}
        return {storage: option for storage, option in options.items() if option is not None}

    return choose


def _again(problem: Problem) -> Decisions:
    return {c.storage: RECOMPUTE_AGAIN for c in problem.movable if c.option("recompute") is not None}


def _mixture(problem: Problem) -> Decisions:
    draw, chosen = random.Random(0), {}
    for storage, saved in problem.view.saved.items():
        candidate = problem.candidate(storage)
        options = [*(candidate.options if candidate is not None else ())]
        if may_act_on(problem.view, saved):
            options.append(SWAP)
        if any(option.kind == "recompute" for option in options):
            options.append(RECOMPUTE_AGAIN)
        picked = draw.choice([None, *options])
        if picked is not None:
            chosen[storage] = picked
    return chosen


CHOICES = {
    "recompute": _every("recompute"),
    "again": _again,
    "swap": _every("swap"),
    "compress": _every("compress"),
    "mix": _mixture,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--ops", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=10**6)
    parser.add_argument("--batch", type=int, default=100)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    failed = False
    ops = tuple(name for name in options.ops.split(",") if name)
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds.split(","):
            held = Held()
            chosen = list(samples((kind,), ops, options.seed, options.most))
            for begin in range(0, len(chosen), options.batch):
                hold(chosen[begin : begin + options.batch], Path(folder), held)
                print(f"{kind}: {begin} of {len(chosen)}", end="\r", file=sys.stderr)
            print(
                f"{kind:10} {held.compared} samples the same in {len(CHOICES) + 1} runs but {len(held.different)}; "
                f"{held.left_out} do not repeat or raise; {held.actions} actions"
            )
            for name, times in Counter(held.different).items():
                print(f"  {name} x{times}")
            failed = failed or bool(held.different)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
