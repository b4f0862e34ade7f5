"""Estimates from profiles: the peak to the byte, scaled by hand, re-traced against a second recording."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.cli.main import run
from memopt.device import Device
from memopt.devices import find_device
from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.elsewhere import from_profile
from memopt.estimators.elsewhere.batch import batch_arguments, grows, label_shape, recorded_batch, scaled
from memopt.estimators.elsewhere.device import on_cuda
from memopt.estimators.elsewhere.from_profile import estimate_trace
from memopt.estimators.elsewhere.recording import amounts_of, recording_of
from memopt.estimators.elsewhere.retrace import argv_at
from memopt.estimators.recording import Recording
from memopt.trace import CATEGORIES, Csr, Ops, Script, Storages, Trace, Values, load_trace
from tests.support.profiled import Run, profiler
from tests.support.toy_trace import toy_trace

SCRIPT = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layers = [torch.nn.Conv2d(3, 12, 3, padding=1), torch.nn.BatchNorm2d(12), torch.nn.ReLU(), torch.nn.Flatten()]
model = torch.nn.Sequential(*layers, torch.nn.Linear(12 * 16 * 16, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    x = torch.randn(args.batch_size, 3, 16, 16, device=device)
    y = torch.randint(0, 10, (args.batch_size,), device=device)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The script recorded at two batch sizes, and at its default."""
    folder = tmp_path_factory.mktemp("profiles")
    script = folder / "small.py"
    script.write_text(SCRIPT)
    with profiler(folder) as profile:
        return {
            "8": profile(str(script), "--batch-size", "8"),
            "24": profile(str(script), "--batch-size=24"),
            "default": profile(str(script)),
        }


def live_after(recording: Recording) -> list[int]:
    """Live bytes after every event; fails on a storage freed twice or before it came."""
    there: set[int] = set()
    total, curve = 0, []
    for event in recording.events:
        row = abs(event) - 1
        assert (event > 0) == (row not in there)
        there ^= {row}
        total += recording.rows[row].size_bytes * (1 if event > 0 else -1)
        curve.append(total)
    return curve


def test_the_peak_of_the_toy_is_its_profiles() -> None:
    trace = toy_trace()
    recording = recording_of(trace, amounts_of(trace), target="cpu")
    assert max(live_after(recording)) == recording.peak()[0] == 8900
    found = estimate_trace(trace)
    assert (found.allocated_bytes, found.method, found.error) == (8900, "replayed", {"allocated": 0.0})
    assert found.by_category == {
        "activation": 4000, "optimizer state": 2000, "parameter": 1000, "gradient": 1000, "temporary": 500,
        "input": 300, "workspace": 100,
    }  # fmt: skip


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Storages with any lives, and an allocator that holds more than they explain."""
    count = draw(st.integers(1, 6))
    lives = []
    for _ in range(draw(st.integers(0, 7))):
        birth = draw(st.integers(-1, count - 1))
        lives.append((draw(st.integers(0, 900)), birth, draw(st.integers(birth, count))))
    made = [draw(st.booleans()) for _ in lives]
    live, extra = [], []
    for op in range(count):
        held = sum(
            s
            for (s, b, d), by in zip(lives, made, strict=True)
            if (b < op or (b == op and not by)) and d >= op
        )
        born = sum(s for (s, b, _), by in zip(lives, made, strict=True) if b == op and by)
        live.append(held + draw(st.integers(0, 50)))
        extra.append(born + draw(st.integers(0, 50)))
    highest = max(a + b for a, b in zip(live, extra, strict=True))
    base = sum(s for s, b, _ in lives if b < 0) + draw(st.integers(0, 50))
    zeros = [0] * count
    writes = [
        [v for v, (life, by) in enumerate(zip(lives, made, strict=True)) if by and life[1] == op]
        for op in range(count)
    ]
    nothing = [0] * len(lives)
    return toy_trace(
        ops=Ops(
            name=zeros, module=zeros, ordinal=zeros, phase=zeros, flags=zeros, line=zeros, time_us=[0.0] * count,
            live_bytes=live, extra_bytes=extra, workspace_bytes=zeros, reads=Csr.of([[]] * count),
            writes=Csr.of(writes), forward_op=[-1] * count,
        ),
        values=Values(
            storage=list(range(len(lives))), output=nothing,
            producer=[life[1] if by else -1 for life, by in zip(lives, made, strict=True)],
        ),
        storages=Storages(
            size_bytes=[s for s, _, _ in lives], category=nothing, birth_op=[b for _, b, _ in lives],
            death_op=[d for _, _, d in lives], only_saved_from=[-1] * len(lives), label=nothing, line=nothing,
        ),
        slots=msgspec.structs.replace(
            toy_trace().slots, **{f: type(getattr(toy_trace().slots, f))() if f not in ("shape", "stride", "unpacks")
                                  else Csr.of([]) for f in toy_trace().slots.__struct_fields__}
        ),
        base_bytes=base,
        peak_bytes=max(base, highest) + draw(st.integers(0, 50)),
    )  # fmt: skip


@given(traces(), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_any_trace_is_replayed_to_its_peak(trace: Trace, passes: int) -> None:
    last = sum(
        s
        for s, d in zip(trace.storages.size_bytes, trace.storages.death_op, strict=True)
        if d == trace.op_count
    )
    recording = recording_of(trace, amounts_of(trace), target="cpu", passes=passes)
    curve = live_after(recording)
    assert max(curve, default=0) == max(trace.peak_bytes, last)


def test_what_an_iteration_leaves_takes_its_old_place_in_the_next() -> None:
    """A gradient of the last iteration dies; the one made in this one is what dies in the next."""
    trace = toy_trace()
    storages = msgspec.structs.replace(trace.storages, birth_op=[-1, -1, -1, -1, 0, 1, 3], death_op=[4, 1, 4, 4, 4, 1, 3],
                                       size_bytes=[1000, 4000, 2000, 300, 4000, 700, 500])  # fmt: skip
    trace = msgspec.structs.replace(trace, storages=storages)
    recording = recording_of(trace, amounts_of(trace), target="cuda", passes=4)
    grads = [row for row in recording.rows if row.size_bytes == 4000]
    assert len(grads) == 5
    ends = [at for kind, at in recording.marks if kind == "step"]
    curve = live_after(recording)
    assert len({curve[end - 1] for end in ends}) == 1


@pytest.mark.parametrize(
    ("label", "shape"),
    [
        ("Net.fc · addmm · 8×3×32 fp32", (8, 3, 32)), ("variable l · scalar fp32", ()), ("from before · 75 int64", (75,)),
        ("", None), ("Net · x", None), ("a · 3×b fp32", None), ("a · " + "9" * 40 + " fp32", None),
    ],
)  # fmt: skip
def test_shapes_in_labels(label: str, shape: tuple[int, ...] | None) -> None:
    assert label_shape(label) == shape


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--batch-size", "32"], [("--batch-size", 32)]),
        (["--train_batch_size=32"], [("--train_batch_size", 32)]),
        (["-b", "32"], [("-b", 32)]),
        (["-b32"], [("-b", 32)]),
        (["-bs", "8", "--bs=9"], [("-bs", 8), ("--bs", 9)]),
        (["data.batch_size=32"], [("data.batch_size", 32)]),
        (["--per_device_train_batch_size", "4"], [("--per_device_train_batch_size", 4)]),
        (["--eval-batch-size", "32", "--layers", "32"], []),
        (["--batch-size", "auto", "32"], []),
        (["--blocks", "32", "--bias=1"], []),
        (["32"], []),
    ],
)
def test_batch_arguments(words: list[str], found: list[tuple[str, int]]) -> None:
    argv = ["train.py", *words]
    assert [(a.flag, a.value) for a in batch_arguments(argv)] == found
    for argument in batch_arguments(argv):
        assert [a.value for a in batch_arguments(argument.set(argv, 77)) if a.flag == argument.flag] == [77]


@pytest.mark.parametrize(
    ("words", "flag", "expected"),
    [
        (["-b", "8"], None, ["-b", "16"]),
        (["--batch-size", "32"], None, ["--batch-size", "64"]),
        ([], "--bs", ["--bs", "16"]),
        (["--bs", "3", "x"], "--bs", ["--bs", "16", "x"]),
        (["--bs=3"], "--bs", ["--bs=16"]),
        (["lr=1"], "batch=", ["lr=1", "batch=16"]),
    ],
)
def test_the_arguments_of_another_batch(words: list[str], flag: str | None, expected: list[str]) -> None:
    trace = toy_trace(script=Script(argv=["train.py", *words], cwd="/"))
    assert argv_at(trace, 8, 16, flag) == ["train.py", *expected]


def test_the_recorded_batch_keeps_the_arguments() -> None:
    trace = toy_trace(script=Script(argv=["train.py", "--batch-size", "8"], cwd="/"))
    assert argv_at(trace, 1, 1, "--batch-size") == trace.script.argv


@pytest.mark.parametrize("words", [[], ["--batch-size", "8", "-b", "8"], ["--batch-size", "3"]])
def test_no_argument_is_guessed(words: list[str]) -> None:
    with pytest.raises(NotPossibleHere, match="batch size"):
        argv_at(toy_trace(script=Script(argv=["train.py", *words], cwd="/")), 8, 12, None)


def shaped(**changes: object) -> Trace:
    """The toy with shapes that a batch of 5 explains: 5×200 activations, a weight of 25×10."""
    trace = toy_trace()
    labels = {
        "variable x · 75 fp32": "variable x · 5×15 fp32",
        "Net.fc · addmm · 1000 fp32": "Net.fc · addmm · 5×200 fp32",
        "Net.act · relu · 175 fp32": "Net.act · relu · 5×35 fp32",
        "Net.fc · mm (backward) · 125 fp32": "Net.fc · mm (backward) · 25×10 fp32",
    }
    strings = [labels.get(text, text) for text in trace.strings]
    return msgspec.structs.replace(trace, strings=strings, **changes)


def test_scaling_by_hand() -> None:
    trace = shaped()
    assert recorded_batch(trace) == 5
    grown = [trace.storage_label(s) for s, grow in enumerate(grows(trace, 5)) if grow]
    assert grown == ["variable x · 5×15 fp32", "Net.fc · addmm · 5×200 fp32", "Net.act · relu · 5×35 fp32"]
    amounts = scaled(trace, amounts_of(trace), 5, 15)
    assert amounts.storage_bytes == [1000, 1000, 2000, 900, 12000, 2100, 500]
    found = estimate_trace(trace, batch_size=15, method="scale")
    assert found.method == "scaled"
    assert found.error["allocated"] > 0.05
    assert {k: v for k, v in found.by_category.items() if k in ("parameter", "input", "activation")} == {
        "parameter": 1000, "input": 900, "activation": 12000,
    }  # fmt: skip


def test_a_data_set_that_was_there_before_does_not_grow() -> None:
    trace = shaped()
    strings = [text.replace("x · 5×15", "x · 75") for text in trace.strings]
    follows = grows(msgspec.structs.replace(trace, strings=strings), 5)
    assert [trace.storage_label(s) for s, grow in enumerate(follows) if grow] == [
        "Net.fc · addmm · 5×200 fp32", "Net.act · relu · 5×35 fp32",
    ]  # fmt: skip


def test_a_librarys_reserve_grows_whatever_its_length() -> None:
    trace = shaped()
    strings = [text.replace("addmm · 5×200 fp32", "mkldnn_rnn_layer · 4001 uint8") for text in trace.strings]
    follows = grows(msgspec.structs.replace(trace, strings=strings), 5)
    assert follows[4]


def test_the_arguments_tell_a_batch_that_is_not_the_first_dimension() -> None:
    trace = shaped(script=Script(argv=["train.py", "--batch", "15"], cwd="/"))
    assert recorded_batch(trace) == 15


def test_no_input_no_batch_size() -> None:
    trace = toy_trace()
    kinds = [
        CATEGORIES.index("temporary") if CATEGORIES[k] == "input" else k for k in trace.storages.category
    ]
    trace = msgspec.structs.replace(trace, storages=msgspec.structs.replace(trace.storages, category=kinds))
    with pytest.raises(NotPossibleHere, match="does not tell its batch size"):
        estimate_trace(trace, batch_size=3, method="scale")


def test_a_cpu_recording_on_a_gpu_says_what_it_cannot_know() -> None:
    trace = shaped()
    found = estimate_trace(trace, device="a100-40gb", method="scale")
    plain = amounts_of(trace)
    amounts = on_cuda(trace, plain, find_device("a100-40gb"))
    assert plain.workspace_bytes == [0, 0, 200, 100]
    assert amounts.workspace_bytes == [0, 0, 0, 0]
    assert set(amounts.unseen_bytes) == {2 * 8519680}
    assert "other operators" in found.notes[0]
    assert found.error["allocated"] > 0.15
    assert found.reserved_bytes >= found.allocated_bytes > 2 * 8519680
    assert found.process_bytes is not None
    assert found.process_bytes > found.reserved_bytes


def test_a_gpus_own_profile_keeps_its_context_and_settings() -> None:
    device = Device(kind="cuda", name="NVIDIA A100-SXM4-40GB", context_bytes=123 << 20, allocator="native")
    trace = toy_trace(device=device)
    found = estimate_trace(trace)
    assert found.device == "a100-40gb"
    assert found.process_bytes == found.reserved_bytes + (123 << 20)
    assert found.allocated_bytes >= trace.peak_bytes
    other = estimate_trace(trace, device="rtx-4090")
    assert other.context_bytes != found.context_bytes
    small = estimate_trace(trace, alloc_conf="expandable_segments:True")
    assert small.reserved_bytes != 0
    with pytest.raises(UsageError, match="not in the table"):
        estimate_trace(msgspec.structs.replace(trace, device=Device(kind="cuda", name="Quantum 9000")))


def test_the_same_batch_is_the_profiles_peak(runs: dict[str, Run]) -> None:
    for recorded in runs.values():
        found = estimate_trace(recorded.trace)
        assert found.allocated_bytes == recorded.trace.peak_bytes
        assert sum(found.by_category.values()) == recorded.trace.peak_bytes


def test_another_batch_scaled_and_re_traced(runs: dict[str, Run]) -> None:
    measured = runs["24"].trace.peak_bytes
    assert recorded_batch(runs["8"].trace) == 8
    guess = estimate_trace(runs["8"].trace, batch_size=24, method="scale")
    assert abs(guess.allocated_bytes / measured - 1) <= guess.error["allocated"]
    exact = estimate_trace(runs["8"].trace, batch_size=24)
    assert exact.method == "re-traced"
    assert "--batch-size 24" in exact.notes[0]
    assert abs(exact.allocated_bytes / measured - 1) <= 0.01


def test_without_an_argument_it_is_scaled_and_says_why(runs: dict[str, Run]) -> None:
    found = estimate_trace(runs["default"].trace, batch_size=24)
    assert found.method == "scaled"
    assert "no argument is seen to set the script's batch size" in found.notes[1]
    with pytest.raises(NotPossibleHere, match="no argument"):
        estimate_trace(runs["default"].trace, batch_size=24, method="retrace")


def test_a_re_trace_that_misses_the_profile_is_not_believed(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = runs["8"].trace
    recording = recording_of(trace, amounts_of(trace), target="cpu")
    bloated = replace(recording, rows=[*recording.rows])
    bloated.rows[0] = replace(bloated.rows[0], size_bytes=10 * trace.peak_bytes)
    monkeypatch.setattr(from_profile, "retrace", lambda *args, **options: (bloated, False))
    found = estimate_trace(trace, batch_size=24)
    assert found.method == "scaled"
    assert "fake tensors miss the profile's own peak" in found.notes[1]


def test_the_largest_batch_and_a_gone_script(runs: dict[str, Run]) -> None:
    trace = runs["8"].trace
    trace = msgspec.structs.replace(trace, script=msgspec.structs.replace(trace.script, cwd="/nowhere"))
    path = runs["8"].path.with_name("gone.profile.json.gz")
    trace.save(path)
    said: list[str] = []
    found = from_profile.FromProfile(load_trace(path), find_device("rtx-4060")).largest(said.append)
    size = int(said[-1].rpartition(" ")[2])
    assert any("not checked by re-tracing" in note for note in found.notes)
    over = estimate_trace(trace, device="rtx-4060", batch_size=size + size // 32, method="scale")
    assert found.fits_named is not None
    assert over.fits_named is not None
    assert (found.fits_named.verdict != "no", over.fits_named.verdict) == (True, "no")


def test_the_command(runs: dict[str, Run], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["estimate", "--json", str(runs["8"].path)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["allocated_bytes"] == runs["8"].trace.peak_bytes
    assert figures["method"] == "replayed"
    capsys.readouterr()
    budget = f"{figures['allocated_bytes'] - 1}B"
    assert run(["estimate", "--fail-over", budget, str(runs["8"].path)]) == 3
    told = capsys.readouterr().err.splitlines()[-1].removeprefix("  try: ")
    assert told == f"memopt advise {runs['8'].path} --budget {budget}"
    assert run([*told.split()[1:], "--time-limit", ".2", "-o", str(tmp_path / "plan")]) == 0
    capsys.readouterr()
    other = ["estimate", "--fail-over", "1KB", "--batch-size", "16", "--method", "scale", str(runs["8"].path)]
    assert run(other) == 3
    assert run(capsys.readouterr().err.splitlines()[-1].split()[2:]) == 0
    assert run(["estimate", "--batch-size", "16", "--method", "scale", str(runs["8"].path)]) == 0
    assert "note: scaled: the recorded iteration of batch 8" in capsys.readouterr().out
