"""Checkmate (Jain et al., MLSys 2020, arXiv 1910.02653): the cheapest recomputation by integer programming.

Rule: R says which ops run in which stage, S which tensors are kept from stage to stage; minimise the time of all runs with the
memory of every moment within the budget. Above some size: solve the linear relaxation, round S, and let R follow from S.
Differs: the enforcer lets a tensor go once, makes it again when it is first asked for and then keeps it, so S is one variable a
tensor (`lower_bound`), and R follows from it: by the simulator, which judges every answer. What the program cannot know (a chain
that runs twice, room for replays) comes back from there: an answer that costs more than promised is cut off, and where one does
not fit, more is asked for at the ops where it did not. One binary a choice, exponential in the worst case. Exact, over all
choices of what to recompute (once each), when it ends by itself on `_FEW` tensors at most; for more the time limit, or
`_ROUNDS` programs, end it. Needs HiGHS.
"""

from __future__ import annotations

import itertools

from memopt.advisors.profiles.picking import cheapest_fitting
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.profiles.tightening import answers
from memopt.estimators.simulator.decision import RECOMPUTE


class Checkmate:
    name = "checkmate"
    paper = "Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization"
    needs = "activations that can be made again; HiGHS (memopt[exact])"
    allows = frozenset({"recompute"})

    def plan(self, problem: Problem, /) -> Decisions:
        everything = {s: RECOMPUTE for s, c in problem.candidates.items() if c.chain is not None}
        plans = itertools.chain(answers(problem, frozenset({"recompute"})), [everything])
        return cheapest_fitting(problem, plans, self.name)
