"""Tensors that are not strided: what was made from them is kept, and a changed one is told as autograd tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memopt.enforcers.verify.digests import digest
from memopt.instrument.saved import Kept
from memopt.trace import REPLAYABLE
from tests.support.enforced import all_again, enforced, everything, plan_of, recorded, seeded


def _graph(layout: str) -> Tensor:
    dense = torch.eye(24).roll(3, 0) + torch.eye(24)
    return dense.to_sparse_csr() if layout == "csr" else dense.to_sparse_coo().coalesce()


def attention_on_edges(steps: int) -> list[str]:
    """As graph attention: scores where there is an edge, of which the dense form is used again."""
    edges, embed = _graph("csr"), nn.Parameter(torch.randn(24, 8))
    optimizer = torch.optim.SGD([embed], lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = torch.tanh(embed)
        scores = torch.sparse.sampled_addmm(edges, hidden, hidden.T.contiguous()).to_dense()
        loss = (torch.sigmoid(scores) * scores).sum()
        loss.backward()
        optimizer.step()
        found += [digest(loss), digest(embed)]
    return found


def attention_twice(steps: int) -> list[str]:
    """The edges are saved, and their dense form could be made again from them."""
    edges, embed = _graph("csr"), nn.Parameter(torch.randn(24, 8))
    optimizer = torch.optim.SGD([embed], lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = torch.tanh(embed)
        scores = torch.sparse.sampled_addmm(edges, hidden, hidden.T.contiguous()).to_dense()
        mask = edges.to_dense()
        loss = (mask * hidden.sum()).square().sum() + scores.sum()
        loss.backward()
        optimizer.step()
        found += [digest(loss), digest(embed)]
    return found


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("loop", [attention_on_edges, attention_twice], ids=lambda loop: loop.__name__)
def test_loops_over_sparse_tensors_are_plain(loop, tmp_path: Path) -> None:
    plain = seeded(loop, 5)
    trace = recorded(loop, tmp_path)
    dense = [op for op in range(trace.op_count) if trace.op_name(op).startswith("aten._to_dense")]
    assert dense
    assert not any(trace.ops.flags[op] & REPLAYABLE for op in dense)
    done = 0
    for choose in (everything("recompute"), all_again, everything("swap")):
        computed, outcome = enforced(loop, plan_of(trace, choose), tmp_path, 5)
        assert computed == plain, outcome
        assert outcome.actions.skipped == 0, outcome
        done += outcome.actions.done
    assert done > 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_changed_sparse_tensor_is_told_as_by_autograd() -> None:
    for layout, words in (("coo", "torch.sparse.FloatTensor"), ("csr", "torch.sparse_csr torch.float32")):
        edges = _graph(layout)
        handle = Kept(edges)
        edges.zero_() if layout == "coo" else edges.mul_(2)
        with pytest.raises(RuntimeError, match=rf"inplace operation: \[{words} .*is at version 1"):
            handle.get()
