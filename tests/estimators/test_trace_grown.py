"""A recorded iteration as a larger one would be: against the larger one as recorded."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.enforcers.verify.digests import digest
from memopt.estimators.elsewhere.trace_grown import grown
from memopt.trace import MAY_GROW, Trace
from tests.support.enforced import enforced, recorded, seeded

WIDTH, WORDS = 128, 500


def texts(steps: int, lengths: tuple[int, ...]) -> list[str]:
    """A text of another length in each step."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), layer, nn.Linear(WIDTH, WORDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    found = []
    for step in range(steps):
        tokens = torch.randint(0, WORDS, (4, lengths[step % len(lengths)]))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return found


def of(folder: Path, *lengths: int) -> Trace:
    return recorded(functools.partial(texts, lengths=lengths), folder)


def routed(steps: int, firsts: tuple[int, ...]) -> list[str]:
    """Of 64 rows some go to one expert, the rest to the other."""
    experts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    optimizer = torch.optim.AdamW([p for each in experts for p in each.parameters()], lr=0.001)
    found = []
    for step in range(steps):
        first, second = torch.randn(64, WIDTH).tensor_split([firsts[step % len(firsts)]])
        loss = experts[0](first).square().sum() + experts[1](second).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return found


def sentences(steps: int, lengths: tuple[int, ...]) -> list[str]:
    """Words one after the other, as many as a sentence has: each saves the same weights once more."""
    cell = nn.RNNCell(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.001)
    found = []
    for step in range(steps):
        state = torch.zeros(64, WIDTH)
        for word in torch.randn(lengths[step % len(lengths)], 64, WIDTH).unbind():
            state = cell(word, state)
        loss = state.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return found


def put_back(steps: int) -> list[str]:
    """Weights that are others in forward, and in every second step are put back before backward, as scripts do that quantize them."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    found = []
    for step in range(steps):
        whole = [weight.data for weight in model.parameters()]
        for weight in model.parameters():
            weight.data = torch.sign(weight.data)
        loss = model(torch.randn(8, WIDTH)).square().sum()
        for late in (False, True):
            if late:
                optimizer.zero_grad()
                loss.backward()
            if late or step % 2:
                for weight, data in zip(model.parameters(), whole, strict=True):
                    weight.data = data
        optimizer.step()
        found.append(digest(loss))
    return found


def elements(trace: Trace) -> int:
    shapes = (trace.slots.shape.row(slot) for slot in range(len(trace.slots.node)))
    return sum(torch.Size(shape).numel() for shape in shapes)


@pytest.mark.parametrize("longer", [80, 128])
def test_it_takes_what_the_larger_one_takes(tmp_path: Path, longer: int) -> None:
    short, long = of(tmp_path, 64), of(tmp_path, longer)
    made = grown(short, elements(long) / elements(short))
    assert made.peak_bytes == pytest.approx(long.peak_bytes, rel=0.02)
    assert made.base_bytes == pytest.approx(long.base_bytes, rel=0.01)
    for op in range(0, short.op_count, 7):
        assert made.ops.live_bytes[op] == pytest.approx(long.ops.live_bytes[op], rel=0.1)
    assert grown(short, 1.0) is short


def test_a_plan_for_it_holds_the_larger_one(tmp_path: Path) -> None:
    short, long = of(tmp_path, 64), of(tmp_path, 80)
    made = grown(short, elements(long) / elements(short))
    budget = int(0.7 * long.peak_bytes)
    plan = Adviser(made, allowed((), ()), time_limit_s=2.0).plan(budget)
    assert plan.actions
    loop = functools.partial(texts, lengths=(80,))
    computed, outcome = enforced(loop, plan, tmp_path, 4, measure=True)
    assert computed == seeded(loop, 4)
    assert outcome.measured_peak_bytes is not None
    assert outcome.measured_peak_bytes <= budget


def test_a_profile_tells_that_iterations_differ_in_size(tmp_path: Path) -> None:
    assert MAY_GROW not in of(tmp_path, 64).facts
    assert of(tmp_path, 32, 48, 64).facts[MAY_GROW] > 110
    assert of(tmp_path, 32, 80, 64).facts[MAY_GROW] > 115


def test_iterations_that_save_as_much_do_not_differ_whatever_is_a_weight_in_them(tmp_path: Path) -> None:
    assert MAY_GROW not in recorded(put_back, tmp_path).facts


def test_a_profile_tells_that_rows_go_to_other_experts(tmp_path: Path) -> None:
    """Each iteration saves as much; which expert's working set is the largest, and so the peak, differs."""
    assert MAY_GROW not in recorded(functools.partial(routed, firsts=(32,)), tmp_path).facts
    facts = recorded(functools.partial(routed, firsts=(31, 32, 32)), tmp_path).facts
    assert 100 < facts[MAY_GROW] < 105
    assert recorded(functools.partial(routed, firsts=(8, 56, 32)), tmp_path).facts[MAY_GROW] == 105


def test_sentences_of_other_lengths_tell_that_iterations_differ(tmp_path: Path) -> None:
    """They save other numbers of tensors, of the same sizes. What each word saves of the weights once more takes no memory."""
    assert MAY_GROW not in recorded(functools.partial(sentences, lengths=(20,)), tmp_path).facts
    trace = recorded(functools.partial(sentences, lengths=(18, 22, 20)), tmp_path)
    assert 130 < trace.facts[MAY_GROW] < 140, "22 words, and as much again as 22 differ from 18"
    longer = recorded(functools.partial(sentences, lengths=(24,)), tmp_path)
    made = grown(trace, elements(longer) / elements(trace))
    assert made.peak_bytes - trace.peak_bytes == pytest.approx(longer.peak_bytes - trace.peak_bytes, rel=0.1)
