"""What of a script reaches the simulated allocator: an emptied cache, a memory fraction, its settings, its streams."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memopt.devices import find_device
from memopt.estimators.estimate import Estimate, estimate_recording, estimate_script
from memopt.estimators.fake.ledger import Enough
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.script import ending
from memopt.estimators.fake.script.request import Request
from memopt.estimators.fake.script.run import record_script
from memopt.estimators.recording import Recording, StorageRow

MIB = 1 << 20
SPEC = find_device("a100-40gb")


def rows(*mib: int) -> list[StorageRow]:
    return [StorageRow(size * MIB, "", "forward", "", "op", n) for n, size in enumerate(mib)]


def after_each_other(**extra: object) -> Recording:
    """40 MiB, given back before 60 are asked for."""
    return replace(
        Recording(target="cuda", rows=rows(40, 60), events=[1, -1, 2, -2]),
        **extra,  # type: ignore[arg-type]
    )


def reserved_mib(recording: Recording, **options: object) -> float:
    return estimate_recording(recording, SPEC, **options).reserved_bytes / MIB  # type: ignore[arg-type]


def test_an_emptied_cache_is_not_reserved() -> None:
    assert reserved_mib(after_each_other()) == 100
    assert reserved_mib(after_each_other(marks=[("empty_cache", 2)])) == 60
    assert reserved_mib(after_each_other(marks=[("empty_cache", 1)])) == 100  # the 40 MiB are live then


def at_fraction(share: float, **extra: object) -> Estimate:
    """Of a device of 160 MiB beside the context."""
    small = find_device("a100-40gb")
    import msgspec

    return estimate_recording(
        after_each_other(memory_fraction=share, **extra),
        msgspec.structs.replace(small, memory_bytes=160 * MIB),
        context_bytes=10 * MIB,
    )


def test_a_memory_fraction_makes_the_allocator_give_back_or_fail() -> None:
    free, tight, failing = at_fraction(1.0), at_fraction(0.5), at_fraction(0.25)
    for found in (free, tight, failing):
        assert found.allocated_bytes == 60 * MIB
        assert found.smallest_bytes == 60 * MIB
        assert found.fits_named is not None
    assert [f.reserved_bytes // MIB for f in (free, tight, failing)] == [100, 60, 100]
    assert [f.fits_named.verdict for f in (free, tight, failing) if f.fits_named] == ["yes", "tight", "no"]
    assert [fit.verdict for fit in free.fits] == ["yes"] * len(free.fits)


def test_garbage_is_collected_only_under_a_fraction() -> None:
    conf = "garbage_collection_threshold:0.5"
    many = Recording(target="cuda", rows=rows(40, 60, 80), events=[1, -1, 2, -2, 3, -3])
    assert reserved_mib(many, alloc_conf=conf) == 180
    share = 150 * MIB / SPEC.memory_bytes
    limited = f"{conf},per_process_memory_fraction:{share:.9f}"
    assert (
        reserved_mib(many, alloc_conf=limited) == 140
    )  # above 75 MiB: both older segments go before the last


def test_a_gpu_of_which_no_context_is_known_is_told() -> None:
    told = [estimate_recording(after_each_other(), find_device(name)) for name in ("mi300x", "h200")]
    assert told[0].context_bytes == 0
    assert told[0].left_out[0].startswith("what the driver's context and kernels take on mi300x")
    assert told[1].context_bytes > 0
    assert not any("context" in text for text in told[1].left_out)


SCRIPT = """
import os
import torch
from torch.utils.checkpoint import checkpoint
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
torch.cuda.set_per_process_memory_fraction(0.75)
side, fast = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
assert torch.cuda.current_stream() == torch.cuda.default_stream() != side != fast
weight = torch.nn.Parameter(torch.randn(1000, 1000, device="cuda"))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(2):
    with torch.cuda.stream(side):
        x = torch.ones(3000, 1000, device="cuda")
        with torch.cuda.stream(None), fast:
            assert torch.cuda.current_stream() == fast
            y = (weight * 2).exp()
    assert torch.cuda.current_stream().cuda_stream == 0
    x.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)
    (y * 3).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
"""


def test_a_script_tells_its_streams_limits_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    Path("train.py").write_text(SCRIPT)
    recording, partial = record_script(Request(argv=["train.py"], steps=2))
    assert not partial
    assert recording.memory_fraction == 0.75
    assert recording.alloc_conf == "expandable_segments:True"
    by_stream = {n: [row for row in recording.rows if row.stream == n] for n in (0, 1, 33)}
    assert sum(map(len, by_stream.values())) == len(recording.rows)
    assert [row.size_bytes for row in by_stream[1]] == [12_000_000] * 2
    phases = [(row.op, row.phase) for row in by_stream[33] if row.size_bytes == 4_000_000]
    step = [("mul.Tensor", "forward"), ("exp.default", "forward"), ("mul.Tensor", "backward"), ("mul.Tensor", "backward")]  # fmt: skip
    assert phases == step * 2  # as autograd has it: backward on the stream of the forward op
    assert [kind for kind, _ in recording.marks].count("empty_cache") == 1
    assert any("record_stream" in note for note in recording.notes)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    found = estimate_script(["train.py"], device="a100-40gb")
    assert "allocator settings as the script has them: expandable_segments:True" in found.notes
    # Expandable: pages of 20 MiB, for each stream its own.
    assert found.reserved_bytes % (2 * MIB) == 0


@pytest.mark.parametrize(
    ("turns", "idle", "steps"),
    [(1, False, [6, 6]), (5, False, [18, 3]), (1, True, [18, 17])],
    ids=["in turn", "five to one", "one never steps"],
)
def test_every_optimizer_is_followed(
    monkeypatch: pytest.MonkeyPatch, turns: int, idle: bool, steps: list[int]
) -> None:
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", torch.optim.Optimizer.__init__)
    with FakeRecorder("cpu") as recorder:
        assert recorder.watch is not None
        ending.Ending(recorder, recorder.watch, 3)
        weights = [recorder.parameter((4, 4)) for _ in range(3)]
        first, second, third = (torch.optim.SGD([weight], 0.1) for weight in weights)
        if not idle:
            del third

        def train() -> None:
            for _ in range(100):
                for optimizer in (*[first] * turns, second):
                    optimizer.step()

        with pytest.raises(Enough):
            train()
        assert list(recorder.watch.steps.values()) == steps
