"""The planning strategies by name. A new one is one file with a class like those here, and one line in `STRATEGIES`."""

from __future__ import annotations

from typing import Protocol

from memopt.advisors.auto import Auto
from memopt.advisors.autoswap import Autoswap
from memopt.advisors.capuchin import Capuchin
from memopt.advisors.dtr import Dtr
from memopt.advisors.flashneuron import Flashneuron
from memopt.advisors.gist import Gist
from memopt.advisors.modnn import Modnn
from memopt.advisors.problem import Decisions, Problem
from memopt.advisors.sentinel import Sentinel
from memopt.advisors.sublinear import Sublinear
from memopt.advisors.superneurons import Superneurons
from memopt.advisors.swapadvisor import Swapadvisor
from memopt.advisors.tflms import Tflms
from memopt.advisors.vdnn import Vdnn
from memopt.advisors.vdnn_plus import VdnnPlus


class Strategy(Protocol):
    """Decides what is kept. Pure: the same problem gives the same decisions (an anytime search: within its time limit)."""

    name: str
    paper: str
    needs: str
    """What it must find in the trace or on the device to be of use."""
    allows: frozenset[str]
    """The kinds of action that it may choose."""

    def plan(self, problem: Problem, /) -> Decisions:
        """Decisions whose peak the simulator puts at or below `problem.target_bytes`. Raises `BudgetInfeasible`."""


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Auto(),
        Sublinear(),
        Capuchin(),
        Vdnn(),
        Vdnn("all"),
        Vdnn("conv"),
        VdnnPlus(),
        Modnn(),
        Superneurons(),
        Autoswap(),
        Tflms(),
        Flashneuron(),
        Swapadvisor(),
        Sentinel(),
        Dtr(),
        Dtr("eqclass"),
        Dtr("local"),
        Dtr("megengine"),
        Gist(),
    )
}
