"""PyTorch's own planners and memopt at equal measured peak: whose step is shorter.

    python -m benchmarks.advise_peers --models gpt2 resnet50 --pairs 2                    # some 25 minutes on two quiet cores
    python -m benchmarks.advise_peers --models gpt2 resnet50 --pairs 1 --kinds rc         # some 14
    python -m benchmarks.advise_peers --models vit --peers compile:inductor:ilp:0.3 sac:0.6 --scale tiny
    python -m benchmarks.advise_peers --survey --peers compile:eager:dp:0.1 compile:eager:dp:0.2   # the peers' peaks only

Peers, on the same script, model, seed, data and optimizer (`train.py`):

    checkpoint                     `torch.utils.checkpoint` around every block, by hand
    compile:BACKEND:SOLVER:RATIO   `activation_memory_budget` RATIO, knapsack by dp, greedy or ilp (needs scipy); see `peers.py` for BACKEND
    sac:RATIO                      SAC ILP of `torch.distributed._tools` (needs pulp, pwlf); see `sac_plan.py` for what had to be supplied

For each the peak is measured, then `memopt advise --budget PEAK` plans twice: `rc` with recompute and compression only, `all` with swapping
to disk too. Peers whose peaks lie within `--within` of each other share the plans made for the smallest; those that save nothing get no line
in the table. All peaks are of the third step, by the same meter, that of `memopt apply` (peers run under an empty plan, which installs no
hooks). Steps are in times of the plain step: whole processes in turn (plain, peers, memopt, then the other way round), without the first
two steps, median over pairs; `say` is what memopt predicted. `same`: how many of the losses are plain's to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench import MEMOPT, ROOT, WARMUP, Failed, Run, execute, mib, profile, train
from benchmarks.models import MODELS, SCALES

PEERS = ("checkpoint", "compile:eager:dp:0.5", "sac:0.6")
KINDS = {"rc": ["--allow", "recompute,compress"], "all": []}


@dataclass
class Contestant:
    """A command that trains the model, the peak it has, its runs and what was predicted."""

    name: str
    command: list[str]
    peak_bytes: int = 0
    predicted: float = 0.0
    runs: list[Run] = field(default_factory=list)


@dataclass
class Group:
    """Peers of nearly one peak, and the plans that have to stay below the smallest."""

    peers: list[Contestant]
    plans: list[Contestant] = field(default_factory=list)
    plain: list[Run] = field(default_factory=list)


class Contest:
    """One model: its script, its profile and the files of its contestants."""

    def __init__(self, model: str, args: argparse.Namespace, folder: Path) -> None:
        self.model = model
        self.args = args
        self.folder = folder
        train_py = str(ROOT / "benchmarks" / "train.py")
        self.script = [train_py, model, "--scale", args.scale, "--optimizer", args.optimizer]
        self.plain = [sys.executable, *self.script, "--steps", str(args.steps)]
        summary = profile([*self.script, "--steps", "3"], folder, "profile.json.gz")
        self.peak_bytes = int(str(summary["peak_bytes"]))
        self.advise("empty.json", "100%", [])

    def advise(self, plan: str, budget: str, words: list[str]) -> None:
        limit = ["--time-limit", str(self.args.time_limit)]
        execute(
            [*MEMOPT, "advise", "profile.json.gz", "--budget", budget, "-f", "-o", plan, *limit, *words],
            self.folder,
        )

    def measured(self, plan: str, words: list[str]) -> dict[str, int | float]:
        """The outcome of three steps under a plan, of which the third is measured."""
        words = [*self.script[1:], "--steps", "3", *words]
        execute([*MEMOPT, "apply", plan, "--outcome", "outcome.json", "-f", "-q", "--", *words], self.folder)
        outcome: dict[str, int | float] = json.loads((self.folder / "outcome.json").read_text())
        return outcome

    def peer(self, name: str) -> Contestant:
        """The peer `name` with its measured peak. Raises `Failed`."""
        words = ["--checkpoint"] if name == "checkpoint" else ["--peer", name]
        if name.startswith("sac:"):
            file = self.folder / f"{name.replace(':', '-')}.json"
            options = ["--scale", self.args.scale, "--ratio", name.removeprefix("sac:"), "-o", str(file)]
            execute([sys.executable, "-m", "benchmarks.sac_plan", self.model, *options], self.folder)
            words = ["--peer", f"sac:{file}"]
        peak_bytes = int(self.measured("empty.json", words)["measured_peak_bytes"])
        return Contestant(name, [*self.plain, *words], peak_bytes)

    def plan(self, kind: str, budget_bytes: int) -> Contestant:
        """memopt's plan for a budget with its measured peak. Raises `Failed`."""
        name = f"{kind}-{budget_bytes}.json"
        self.advise(name, str(budget_bytes), KINDS[kind])
        outcome = self.measured(name, [])
        return Contestant(
            kind,
            [*MEMOPT, "apply", name, "--no-measure", "-q", "--", *self.plain[2:]],
            int(outcome["measured_peak_bytes"]),
            outcome["predicted_step_ms"] / outcome["plain_step_ms"],
        )

    def peers(self) -> list[Contestant]:
        """All that run here, by peak; a line for each."""
        found = []
        for name in self.args.peers:
            begin = time.perf_counter()
            try:
                found.append(self.peer(name))
            except Failed as failure:
                self.say(f"{name}: {why(failure)}")
                continue
            share = found[-1].peak_bytes / self.peak_bytes
            seconds = time.perf_counter() - begin
            self.say(
                f"{name}: {mib(found[-1].peak_bytes)} of {mib(self.peak_bytes)} MiB, {share:.1%} ({seconds:.0f} s)"
            )
        return sorted(found, key=lambda peer: peer.peak_bytes)

    def hold(self) -> None:
        """Print the table's lines for this model."""
        peers = self.peers()
        if self.args.survey:
            return
        groups = grouped([peer for peer in peers if peer.peak_bytes < self.peak_bytes], self.args.within)
        for group in groups:
            for kind in self.args.kinds:
                try:
                    group.plans.append(self.plan(kind, group.peers[0].peak_bytes))
                except Failed as failure:
                    self.say(f"memopt {kind} below {mib(group.peers[0].peak_bytes)} MiB: {why(failure)}")
        print(heading(self.args.kinds), flush=True)
        for group in groups:
            for number in range(self.args.pairs):
                self.run(group, backwards=number % 2 == 1)
            for peer in group.peers:
                print(self.line(peer, group), flush=True)

    def run(self, group: Group, *, backwards: bool) -> None:
        """One run of plain and each contestant of the group, in turn."""
        turns = [(self.plain, group.plain)]
        turns += [(one.command, one.runs) for one in [*group.peers, *group.plans]]
        for command, runs in reversed(turns) if backwards else turns:
            runs.append(train(command, self.folder))

    def line(self, peer: Contestant, group: Group) -> str:
        """The table's line of one peer, memopt's plans beside it."""
        step = ratio(peer.runs, group.plain)
        plain_ms = statistics.median(run.step_ms for run in group.plain)
        text = f"{self.model:<13}{peer.name:<26}{mib(peer.peak_bytes):>7}{peer.peak_bytes / self.peak_bytes:>7.1%}"
        text += f"{same(peer.runs, group.plain):>6}{plain_ms:>8.0f}{step:>7.3f}"
        for kind in self.args.kinds:
            plans = [plan for plan in group.plans if plan.name == kind]
            text += against(plans[0], step, group.plain) if plans else f"{'no plan':>38}"
        return text

    def say(self, text: str) -> None:
        print(f"# {self.model}: {text}", flush=True)


def against(plan: Contestant, step: float, plain: list[Run]) -> str:
    """A plan's cells beside a peer whose step is `step` times the plain one."""
    own = ratio(plan.runs, plain)
    lower = "memopt" if own < step else "PEER"
    return f"{mib(plan.peak_bytes):>10}{same(plan.runs, plain):>6}{plan.predicted:>7.3f}{own:>7.3f}{lower:>8}"


def heading(kinds: list[str]) -> str:
    """The table's first line."""
    text = f"{'MiB, ms':<13}{'peer':<26}{'peak':>7}{'share':>7}{'same':>6}{'plain':>8}{'step':>7}"
    return text + "".join(f"{kind:>10}{'same':>6}{'say':>7}{'step':>7}{'lower':>8}" for kind in kinds)


def why(failure: Failed) -> str:
    """What a failed command said last."""
    return " ".join(failure.args[0][-2:])


def grouped(peers: list[Contestant], within: float) -> list[Group]:
    """Peers, sorted by peak, that lie within a share of the smallest of their group."""
    groups: list[Group] = []
    for peer in peers:
        if groups and peer.peak_bytes <= groups[-1].peers[0].peak_bytes * (1 + within):
            groups[-1].peers.append(peer)
        else:
            groups.append(Group([peer]))
    return groups


def ratio(runs: list[Run], plain: list[Run]) -> float:
    """Step time in times of the plain run of the same turn, median over turns."""
    return statistics.median(run.step_ms / other.step_ms for run, other in zip(runs, plain, strict=True))


def same(runs: list[Run], plain: list[Run]) -> str:
    """How many of the losses of a run, at least, are those of the plain one."""
    equal = min(
        sum(a == b for a, b in zip(run.results, other.results, strict=True))
        for run, other in zip(runs, plain, strict=True)
    )
    return f"{equal}/{len(plain[0].results)}"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; `make bench-advise` passes the words of the other programs too, which are not ours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2", "resnet50"])
    parser.add_argument("--peers", nargs="+", default=PEERS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--scale", choices=SCALES, default="bench")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--steps", type=int, default=WARMUP + 1)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--within", type=float, default=0.05, help="peers this near share plans")
    parser.add_argument("--time-limit", type=float, default=8.0, help="of memopt advise")
    parser.add_argument("--survey", action="store_true", help="measure the peers' peaks and end")
    return parser.parse_known_args(words)[0]


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))  # a second run compiles nothing
        for model in args.models:
            Contest(model, args, Path(folder)).hold()


if __name__ == "__main__":
    main()
