"""What a meter takes for memory at its start: the storages that have bytes, each once."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memopt.instrument.memory.meter import CpuMeter, living_storages
from tests.support.enforced import recorded


class Wrapper(Tensor):
    """As DTensor: shapes of its own, the bytes are another tensor's."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Child(Tensor):
    """A subclass whose bytes are its own."""


def _bytes_alive() -> int:
    gc.collect()
    return sum(storage.nbytes() for storage in living_storages("cpu"))


def test_wrappers_have_no_bytes_of_their_own() -> None:
    before = _bytes_alive()
    inner = torch.zeros(1000)
    wrapper, child = Wrapper(inner), torch.zeros(30).as_subclass(Child)
    view = inner[3:]
    assert wrapper.untyped_storage().nbytes() == 4000
    assert _bytes_alive() - before == 4000 + 120
    assert _bytes_alive() - before == 4000 + 120, "looking once does not change what is found"
    del wrapper, child, view


def test_a_file_that_is_mapped_counts_by_its_tensors(tmp_path: Path) -> None:
    """The storage of the whole file is held too, beside the parts of it that the tensors have."""
    torch.save({"a": torch.zeros(100_000), "b": torch.zeros(50)}, tmp_path / "saved.pt")
    before = _bytes_alive()
    loaded = torch.load(tmp_path / "saved.pt", mmap=True, weights_only=True)
    assert _bytes_alive() - before == 400_000 + 200
    del loaded["a"]
    assert _bytes_alive() - before == 200


def test_a_block_where_one_of_an_earlier_profile_lay_ends_once() -> None:
    """torch's profiler takes it for the earlier one and tells of its end, which the meter sees by itself."""
    size = 10 * 2**20  # elements: more than glibc keeps, so the system hands out the same addresses again
    others: list[torch.Tensor] = []
    for _ in range(20):  # the heap may have had other room for it first
        first = CpuMeter()
        first.start()
        old = torch.empty(size)
        first.stop()
        address = old.data_ptr()
        del old
        again = torch.empty(size)
        if again.data_ptr() == address:
            break
        others.append(again)
    assert again.data_ptr() == address
    base = _bytes_alive()
    meter = CpuMeter()
    meter.start()
    del again
    new = torch.empty(2 * size)
    assert meter.stop() == base - 4 * size + new.nbytes


def test_a_gradient_that_nobody_has_looked_at_counts() -> None:
    leaf = torch.ones(1000, requires_grad=True)
    before = _bytes_alive()
    leaf.mul(2).sum().backward()
    assert _bytes_alive() - before == 4000
    leaf.grad = None
    assert _bytes_alive() - before == 0


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so of every profile
def test_a_meter_that_gave_way_says_no_more() -> None:
    first = CpuMeter()
    first.start()
    old = torch.empty(1_000_000)
    first.stop()
    first.start()
    with torch.profiler.profile():
        assert first.stop() is None, "the script's own profile goes first"
    base = _bytes_alive()
    second = CpuMeter()
    second.start()
    del old
    new = torch.empty(3_000_000)
    assert second.stop() == base - 4_000_000 + new.nbytes


def test_gradients_count_whoever_holds_them() -> None:
    """Of a leaf that has been frozen since, and of a tensor that `retain_grad()` was called on; nobody has looked at them."""
    leaf = torch.zeros(1000, requires_grad=True)
    between = leaf * 2
    between.retain_grad()
    passing = between * 1
    before = _bytes_alive()
    passing.sum().backward()
    leaf.requires_grad_(False)
    assert _bytes_alive() - before == 4000 + 4000


def test_a_parameter_that_is_no_leaf_is_looked_at_without_a_warning(tmp_path: Path) -> None:
    """As a learned optimizer registers them: their own gradients are kept, and count."""

    def loop(steps: int) -> list[str]:
        model = torch.nn.Linear(8, 8, bias=False)
        start = model._parameters.pop("weight")
        rate = torch.zeros(8, 8, requires_grad=True)
        optimizer = torch.optim.SGD([rate], lr=0.1)
        for _ in range(steps):
            weight = start.detach() + rate
            weight.retain_grad()
            model._parameters["weight"] = weight
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    trace = recorded(loop, tmp_path)
    gradients = list(map(trace.storage_label, range(len(trace.storages.size_bytes))))
    assert any("gradient of" in label for label in gradients), gradients


def test_what_is_held_in_calls_without_gradients_is_told_apart() -> None:
    meter, base = CpuMeter(), _bytes_alive()
    meter.start()
    torch.empty(1_000_000)
    meter.without_gradients(True)
    torch.empty(3_000_000)
    meter.without_gradients(False)
    torch.empty(2_000_000)
    assert meter.stop() == base + 8_000_000
    assert meter.without_gradients_bytes == base + 12_000_000


def test_what_there_was_before_an_evaluation_ended_is_its_own() -> None:
    meter, base = CpuMeter(), _bytes_alive()
    meter.start()
    torch.empty(5_000_000)
    meter.evaluation_ended()
    torch.empty(2_000_000)
    assert meter.stop() == base + 8_000_000
    assert meter.without_gradients_bytes == base + 20_000_000


def test_what_is_held_meanwhile_is_left_out() -> None:
    """Optimizer state that is back as the script looks at it, also inside an evaluation."""
    meter, base = CpuMeter(), _bytes_alive()
    meter.start()
    meter.leave_out(True)
    torch.empty(3_000_000)
    meter.without_gradients(True)
    torch.empty(4_000_000)
    meter.without_gradients(False)
    meter.leave_out(False)
    torch.empty(2_000_000)
    assert meter.stop() == base + 8_000_000
    assert meter.without_gradients_bytes == 0


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_a_sparse_gradient_is_made_of_counts(tmp_path: Path) -> None:
    """One that lives until the next iteration's forward is over was in no figure: 73 MiB of 63 were told as held at 60."""

    def loop(steps: int) -> list[str]:
        table = torch.nn.Embedding(64, 256, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), 0.1)
        for _ in range(steps):
            found = table(torch.randint(0, 64, (4096,))).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
        return []

    before = _bytes_alive()
    table = torch.nn.Embedding(64, 256, sparse=True)
    table(torch.zeros(4096, dtype=torch.int64)).sum().backward()
    csr = torch.sparse_csr_tensor(torch.arange(1025), torch.arange(1024), torch.ones(1024))
    rows = 4096 * (256 * 4 + 8)
    assert _bytes_alive() - before == table.weight.nbytes + rows + 1024 * (4 + 8) + 1025 * 8
    del table, csr
    trace = recorded(loop, tmp_path)
    assert trace.base_bytes - before >= rows
    labels = {trace.storage_label(row): size for row, size in enumerate(trace.storages.size_bytes)}
    assert any("gradient of" in label and size == 4096 * 256 * 4 for label, size in labels.items()), labels
