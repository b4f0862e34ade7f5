"""What running on a GPU asks of replays: the right generator, and only ops that repeat their bits (as seen on an H100)."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memopt.enforcers import engine, replays
from memopt.enforcers.records import generator_state
from memopt.instrument.ops import kind_of, same_bits_again
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded, state_digests

FIGURES = Path(__file__).parents[2] / "benchmarks" / "gpu" / "data" / "h100_correctness.jsonl"

_OUTPUTS_NOBODY_READS = {
    "aten._efficient_attention_forward.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._flash_attention_forward.default",
}
"""Without dropout the seed and offset that they give are never written; the scripts that ran on the H100 with them kept their bits."""
_DREW_FROM_ANOTHER_GENERATOR = {
    "aten.randn_like.default",
    "aten.randint_like.default",
    "aten.randint_like.low_dtype",
}
"""Samples that name a device: mended since, by `generator_state`."""


@pytest.fixture
def gpus(monkeypatch):
    generators = tuple(torch.Generator().manual_seed(seed) for seed in (1, 2))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return generators


@pytest.mark.parametrize(("named", "index"), [("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_named_device_says_which_generator_is_drawn_from(gpus, named, index):
    generator, state = generator_state([[2, 3], torch.float32, None, torch.device(named), False])
    assert generator is gpus[index]
    assert torch.equal(state, gpus[index].get_state())


def test_a_named_device_goes_before_that_of_the_tensors(gpus):
    assert generator_state([torch.ones(2), torch.device("cuda:0")])[0] is gpus[0]
    assert generator_state([torch.ones(2)])[0] is torch.default_generator


def _differed() -> set[str]:
    found = set()
    for line in FIGURES.read_text().splitlines():
        row = json.loads(line)
        if row["job"].startswith("replays"):
            found |= set(row["differ"])
    return found


def _overload(name: str):
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def test_no_op_is_replayed_that_gave_other_bits_on_a_gpu():
    on_cpu = [torch.ones(2)]
    names = _differed() - _OUTPUTS_NOBODY_READS - _DREW_FROM_ANOTHER_GENERATOR
    assert len(names) >= 7
    for name in names:
        assert kind_of(_overload(name)).replayable, name
        assert not same_bits_again(_overload(name), [on_gpu()]), name
        assert same_bits_again(_overload(name), on_cpu), name


NONDETERMINISTIC = (
    "cumsum.default", "nll_loss2d_forward.default", "kthvalue.default", "median.dim", "index_put.default", "index_put_.default",
    "_index_put_impl_.default", "scatter.src", "scatter_.src", "scatter_add.default", "scatter_add_.default", "scatter_reduce.two",
    "scatter_reduce_.two", "index_add.default", "index_reduce.default", "index_reduce_.default", "max_unpool2d.default",
    "max_unpool3d.default", "put.default", "put_.default", "index_copy.default", "histc.default", "bincount.default",
    "_cudnn_attention_forward.default",
)  # fmt: skip
"""Forwards that torch's `use_deterministic_algorithms` names, and one of which nobody has compared the bits."""


@pytest.mark.parametrize("name", NONDETERMINISTIC)
def test_what_cuda_calls_nondeterministic_is_not_replayed(name):
    overload = _overload(f"aten.{name}")
    assert not (kind_of(overload).replayable and same_bits_again(overload, [on_gpu()]))


def on_gpu():
    """As much of a GPU's tensor as is asked for."""
    return SimpleNamespace(layout=torch.strided, is_quantized=False, device=torch.device("cuda"), is_floating_point=lambda: True)  # fmt: skip


def test_an_op_that_may_give_other_bits_is_kept_and_the_outcome_says_so(tmp_path, monkeypatch):
    def loop(steps):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 4, 3), nn.GELU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 3, 16, 16)).square().mean().backward()
            optimizer.step()
        return state_digests(model)

    plan = plan_of(recorded(loop, tmp_path), everything("recompute"))
    plain, (_, before) = seeded(loop, 3), enforced(loop, plan, tmp_path, 3)
    monkeypatch.setattr(engine, "same_bits_again", lambda func, tensors: "convolution" not in str(func))
    computed, outcome = enforced(loop, plan, tmp_path, 3)
    assert computed == plain
    assert outcome.actions.done < before.actions.done
    note = "kept what aten.convolution.default made: run again, it may give other bits"
    assert any(each.startswith(note) for each in outcome.notes)
    assert not any(each.startswith(note) for each in before.notes)


def test_whole_numbers_are_added_up_the_same_each_time():
    counts = [SimpleNamespace(layout=torch.strided, is_quantized=False, device=torch.device("cuda"), is_floating_point=lambda: False, is_complex=lambda: False)]  # fmt: skip
    assert same_bits_again(torch.ops.aten.cumsum.default, counts)


def test_convolutions_are_not_replayed_where_each_thread_chooses_its_own_engine():
    convolution = torch.ops.aten.convolution.default
    assert same_bits_again(convolution, [on_gpu()])
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert not same_bits_again(convolution, [on_gpu()])
        assert same_bits_again(convolution, [torch.ones(2)])


def test_running_statistics_that_sync_batch_norm_updates_are_known():
    for name in ("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"):
        assert kind_of(getattr(torch.ops.aten, name).default).statistics == (3, 4, None)


class _CudaGenerator:
    """As `CUDAGeneratorImpl.cpp`: to set the state by value lets cuDNN's next recurrent layer seed its dropout anew."""

    device = torch.device("cuda")

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.seeds_dropout_anew = numbers, False

    def set_state(self, state: list[int]) -> None:
        self.numbers[:] = state
        self.seeds_dropout_anew = True

    def clone_state(self) -> _CudaGenerator:
        return _CudaGenerator(list(self.numbers))

    def graphsafe_get_state(self) -> _CudaGenerator:
        return _CudaGenerator(self.numbers)

    def graphsafe_set_state(self, other: _CudaGenerator) -> None:
        self.numbers = other.numbers


@pytest.mark.parametrize("fails", [False, True])
def test_random_numbers_are_drawn_again_without_a_trace_in_cudnns_dropout(fails):
    """An LSTM with dropout beside a dropout that was recomputed trained otherwise from the second iteration on (H100, H200)."""
    generator, drawn = _CudaGenerator([7, 8, 9]), []

    def draw():
        drawn.append(generator.numbers.pop(0))
        if fails:
            raise RuntimeError("out of memory")

    record = SimpleNamespace(rng=(generator, [1, 2]), func=draw)
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        replays._draw_again(record, (), {})
    assert drawn == [1]
    assert generator.numbers == [7, 8, 9]
    assert not generator.seeds_dropout_anew
