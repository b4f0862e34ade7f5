"""A linear or mixed-integer program, built column by column and row by row, and solved by HiGHS (`pip install 'memopt[exact]'`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopt.advisors.clock import wall_s
from memopt.errors import NotPossibleHere


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solver came to. `bound`: no solution of the program costs less (as far as it got); infinite when there is none."""

    values: NDArray[np.float64] | None
    """The best solution; None when none was found."""
    bound: float


@dataclass(slots=True)
class Program:
    """Minimise the cost of the columns, each between its limits, every row between its own."""

    cost: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0, *, least: float = 0.0, most: float = 1.0, whole: bool = False) -> int:
        """A new column between `least` and `most`; its number."""
        self.cost.append(cost)
        self.least.append(least)
        self.most.append(most)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms: Mapping[int, float], *, low: float = -math.inf, high: float = math.inf) -> None:
        """A new row: column -> factor."""
        self.columns.extend(terms)
        self.factors.extend(terms.values())
        self.starts.append(len(self.columns))
        self.row_low.append(low)
        self.row_high.append(high)

    def solver(self, seconds: float, *, relaxed: bool = False) -> Any:
        """HiGHS with this program in it, not yet run. Raises `NotPossibleHere` without HiGHS."""
        highs = _new_highs(seconds)
        import highspy

        highs.passModel(self._model(highspy, relaxed))
        return highs

    def solve(self, seconds: float, *, relaxed: bool = False) -> Solved:
        """The cheapest solution found within `seconds`; `relaxed`: columns need not be whole. Raises `NotPossibleHere` without HiGHS."""
        highs = self.solver(max(0.01, seconds), relaxed=relaxed)
        import highspy

        highs.run()
        info, status = highs.getInfo(), highs.getModelStatus()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Solved(None, math.inf)
        found = info.primal_solution_status == 2
        values = np.array(highs.getSolution().col_value) if found else None
        mixed = any(self.whole) and not relaxed
        if mixed:
            bound = float(info.mip_dual_bound)
        else:
            done = status == highspy.HighsModelStatus.kOptimal
            bound = float(info.objective_function_value) if done else 0.0
        return Solved(values, bound if math.isfinite(bound) else 0.0)

    def _model(self, highspy: Any, relaxed: bool) -> Any:
        model = highspy.HighsLp()
        columns, rows = len(self.cost), len(self.row_low)
        model.num_col_, model.num_row_ = columns, rows
        model.col_cost_ = np.array(self.cost)
        model.col_lower_, model.col_upper_ = np.array(self.least), np.array(self.most)
        model.row_lower_, model.row_upper_ = np.array(self.row_low), np.array(self.row_high)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.num_col_, model.a_matrix_.num_row_ = columns, rows
        model.a_matrix_.start_ = np.array(self.starts, dtype=np.int32)
        model.a_matrix_.index_ = np.array(self.columns, dtype=np.int32)
        model.a_matrix_.value_ = np.array(self.factors)
        if any(self.whole) and not relaxed:
            kinds = highspy.HighsVarType
            model.integrality_ = [kinds.kInteger if each else kinds.kContinuous for each in self.whole]
        return model


def _new_highs(time_limit_s: float) -> Any:
    """A quiet solver; `NotPossibleHere` without highspy."""
    try:
        import highspy
    except ImportError:
        raise NotPossibleHere(
            "highspy is not installed",
            why="this strategy is an integer program",
            try_="pip install 'memopt[exact]'",
        ) from None
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("time_limit", wall_s(time_limit_s))
    highs.setOptionValue("threads", 1)
    return highs
