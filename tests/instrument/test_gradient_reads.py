"""Who looks at gradients: the property that takes the place of `Tensor.grad`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from memopt.instrument.stepping.gradient_reads import GradientReads


def test_torch_may_ask_whose_attribute_it_is():
    """2.11's dynamo does as it is imported: a script that imported it under a plan died."""
    reads = GradientReads(SimpleNamespace(read=None, set=None, zeroed=None))
    reads.install()
    try:
        getter = torch.Tensor.grad.__get__
        assert getter.__self__.__objclass__ is torch.Tensor
    finally:
        reads.remove()
    assert "grad" not in vars(torch.Tensor)
