"""Ops whose kernels ask what is switched on around them give the bits of a plain run while memopt's modes are on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memopt.enforcers.verify.digests import digest
from memopt.instrument.as_plain import PlainForms
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded


def _complex() -> Tensor:
    return torch.linalg.pinv(torch.randn(6, 6, dtype=torch.complex64))


def _negative() -> Tensor:
    return torch.linalg.pinv(torch.randn(6, 6, dtype=torch.complex64).conj().imag)


def _spectral_norms() -> Tensor:
    matrix = torch.randn(9, 9)
    symmetric = matrix + matrix.T
    return torch.cat(
        [
            torch.linalg.svdvals(matrix),
            torch.linalg.eigvalsh(symmetric),
            torch.view_as_real(torch.linalg.eigvals(matrix)).flatten(),
            torch.linalg.cond(matrix)[None],
            torch.linalg.matrix_norm(matrix, "nuc")[None],
            torch.linalg.matrix_rank(symmetric, hermitian=True)[None],
        ]
    )


def _without_gradients() -> Tensor:
    with torch.no_grad():
        return _spectral_norms()


def _inference() -> Tensor:
    with torch.inference_mode():
        return _spectral_norms().clone()


def _under_autocast() -> Tensor:
    matrix = torch.randn(9, 9)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        products = torch.linalg.pinv(matrix), torch.pinverse(matrix), nn.Bilinear(9, 9, 3)(matrix, matrix)
    return torch.cat([each.float().flatten() for each in products])


def _forward_derivative() -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.randn(5, 5), torch.ones(5, 5))
        values = torch.autograd.forward_ad.unpack_dual(torch.linalg.svdvals(dual))
        assert values.tangent is not None
        return torch.cat([values.primal, values.tangent])


SHAPES = [
    ((32, 3, 3), (1, 3, 3)),
    ((1, 3, 3), (32, 3, 3)),
    ((64, 257, 3), (1, 3, 3)),
    ((1, 7, 5), (4, 5, 6)),
    ((0, 2, 3), (1, 3, 2)),
    ((1, 2, 3), (1, 3, 2)),
    ((5, 33), (4, 33, 6)),
    ((2, 1, 4, 5), (3, 5, 6)),
]


def _products() -> Tensor:
    """Batches of matrices, one of them of a single one, with and without gradients: torch folds that one in where a mode is on."""
    found = []
    for one, other in SHAPES:
        for first, second in ((False, False), (True, False), (False, True)):
            a = torch.randn(one, requires_grad=first)
            b = torch.randn(other, requires_grad=second)
            product = a @ b
            found += [product.detach().flatten(), torch.tensor(product.stride(), dtype=torch.float)]
            if first or second:
                product.sin().sum().backward()
            found += [each.grad.flatten() for each in (a, b) if each.grad is not None]
    return torch.cat(found)


CASES = [
    _products,
    _complex,
    _negative,
    _spectral_norms,
    _without_gradients,
    _inference,
    _under_autocast,
    _forward_derivative,
]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("compute", CASES, ids=lambda case: case.__name__.strip("_"))
def test_the_same_bits_under_modes(compute: Callable[[], Tensor], tmp_path: Path) -> None:
    seen: list[str] = []

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen.clear()
        for step in range(steps):
            torch.manual_seed(step)
            seen.append(digest(compute()))
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return [*seen]

    plain = seeded(loop, 4)
    trace = recorded(loop, tmp_path)
    assert seen == plain[: len(seen)], "profiled"
    computed, outcome = enforced(loop, plan_of(trace, everything("recompute")), tmp_path, 4)
    assert computed == plain
    assert outcome.actions.done > 0


def test_forms_are_gone_when_removed() -> None:
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_svdvals", "AutogradCPU")
    forms = PlainForms()
    forms.install()
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_svdvals", "AutogradCPU")
    batches = torch.randn(3, 4, 4)
    inside = torch.func.vmap(torch.linalg.svdvals)(batches)
    forms.remove()
    assert torch.equal(inside, torch.func.vmap(torch.linalg.svdvals)(batches))
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_svdvals", "AutogradCPU")
