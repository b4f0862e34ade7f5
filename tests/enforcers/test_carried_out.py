"""How much of a plan is said to have been carried out."""

from __future__ import annotations

from pathlib import Path

import torch

from memopt.enforcers.carried_out import Account, notes_on_tensors
from tests.support.enforced import all_again, enforced, plan_of, recorded


def test_what_was_done_in_one_iteration_only_was_not_done(tmp_path: Path) -> None:
    """From the fifth step on the loop trains other modules, whose calls save tensors of the same number and sizes."""

    def loop(steps: int) -> list[str]:
        halves = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(2)]
        halves[1] = torch.nn.Sequential(halves[1])
        optimizer = torch.optim.SGD([each for half in halves for each in half.parameters()], 0.1)
        for step in range(steps):
            optimizer.zero_grad()
            halves[step > 3](torch.ones(4096, 64)).square().mean().backward()
            optimizer.step()
        return []

    plan = plan_of(recorded(loop, tmp_path), all_again)
    for steps, done in ((6, True), (16, False)):
        _, outcome = enforced(loop, plan, tmp_path, steps)
        assert outcome.actions.planned > 0
        assert (outcome.actions.done > 0) == done
        assert any("skipped in most iterations, and taken in 3 of 15" in n for n in outcome.notes) == (not done)  # fmt: skip
    assert outcome.actions.skipped == outcome.actions.planned


def test_iterations_unlike_the_profiled_one_do_not_count_where_others_are_like_it() -> None:
    account = Account()
    for is_like in (True, False, False, False, False, True):
        account.iteration_ended([1, 2] if is_like else [], is_like=is_like)
    assert account.usual == {1, 2}
    assert notes_on_tensors(account, None) == []


def test_where_no_iteration_is_like_the_profiled_one_all_count() -> None:
    account = Account()
    for whole in ([1, 2], [1, 2], [1], [1], [1], [1]):
        account.iteration_ended(whole, is_like=False)
    account.decline(2, "no reason")
    assert account.usual == {1}
    assert notes_on_tensors(account, None) == ["1 action skipped: no reason"]


def test_that_the_guard_held_most_iterations_without_the_plan_is_told() -> None:
    """They ran the same ops, and began with more than was planned for."""
    for alone, why in ((6, "in 6 the guard"), (0, "the others ran other ops or calls than the profiled one")):
        account = Account(alone=alone)
        for taken in (True, True, False, False, False, False, False, False):
            account.iteration_ended([1] if taken else [], is_like=True)
        (note,) = notes_on_tensors(account, None)
        assert note.startswith("1 action skipped in most iterations, and taken in 1 of 7: ")
        assert why in note
