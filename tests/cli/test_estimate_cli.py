"""`memopt estimate` as typed: arguments, JSON, the gate, the batch search."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from memopt.cli.estimate import _with_flag
from memopt.cli.main import group
from memopt.cli.main import run as run_memopt
from memopt.devices import find_device
from memopt.errors import GateFailed, MemoptError, NotPossibleHere, UsageError
from memopt.estimators import batch_search
from memopt.estimators import estimate as answers
from memopt.estimators.error_bars import error_bar, error_bars
from memopt.estimators.estimate import Estimate, estimate_recording
from memopt.estimators.recording import Recording, StorageRow
from memopt.reports.estimate import print_estimate

MIB = 1 << 20


def recording(scale: int = 1) -> Recording:
    rows = [
        StorageRow(100 * MIB * scale, "parameter", "forward", "Net", "empty", 0),
        StorageRow(40 * MIB * scale, "activation", "forward", "Net.layer", "mm", 1),
        StorageRow(8 * MIB, "workspace", "backward", "Net.layer", "mm", 2),
    ]
    return Recording(target="cuda", rows=rows, events=[1, 2, 3, -3, -2], marks=[("backward", 2), ("step", 5)])


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    seen: list[list[str]] = []

    def script(argv: list[str], *, device: str, **settings: object) -> Estimate:
        seen.append(argv)
        scale = int(argv[argv.index("--bs") + 1]) if "--bs" in argv else 1
        return estimate_recording(recording(scale), find_device(device))

    monkeypatch.setattr(answers, "estimate_script", script)
    return seen


def run(*args: str) -> str:
    result = CliRunner().invoke(group, ["estimate", *args], catch_exceptions=True, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_exact_answers_of_a_toy_recording() -> None:
    found = estimate_recording(recording(), find_device("a100-40gb"))
    assert found.allocated_bytes == 148 * MIB
    assert found.reserved_bytes == (100 + 40 + 20) * MIB  # 8 MiB comes from a 20 MiB segment
    assert found.process_bytes == found.reserved_bytes + found.context_bytes
    assert found.by_category == {"parameter": 100 * MIB, "activation": 40 * MIB, "workspace": 8 * MIB}
    assert found.by_module == {"Net": 100 * MIB, "Net.layer": 48 * MIB}
    assert (found.peak_phase, found.peak_op) == ("backward", "mm")
    assert all(fit.verdict == "yes" for fit in found.fits)


def test_a_script_that_never_uses_the_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimate_recording(Recording(target="cuda", rows=[], events=[], marks=[]), find_device("t4"))
    assert found.allocated_bytes == 0
    assert "nothing was put on the GPU" in found.notes[0]
    print_estimate(Console(width=200), found, "train.py")
    printed = capsys.readouterr().out
    assert "nothing was put on the GPU" in printed
    assert "at the peak (" not in printed


def test_everything_after_the_script_is_the_scripts(canned: list[list[str]]) -> None:
    out = run("--device", "h200", "train.py", "--json", "--device", "cpu", "-m", "x", "--help")
    assert canned == [["train.py", "--json", "--device", "cpu", "-m", "x", "--help"]]
    assert "max_memory_reserved" in out
    assert "fits on h200" in out


def test_json_is_one_object(canned: list[list[str]]) -> None:
    found = json.loads(run("--json", "train.py"))
    assert found["allocated_bytes"] == 148 * MIB
    assert found["partial"] is False
    assert found["left_out"] == []
    assert found["most_bytes"]["process"] == found["process_bytes"]
    assert {"allocated", "reserved", "process"} == set(found["error"])


def test_explain_shows_the_policies(canned: list[list[str]]) -> None:
    out = run("--explain", "train.py")
    assert "ALLOC_ON_START" in out
    assert "RELEASE_ON_DEATH" in out


def test_the_gate(canned: list[list[str]]) -> None:
    run("--fail-over", "16GB", "train.py")
    with pytest.raises(GateFailed) as caught:
        run("--fail-over", "100MB", "train.py")
    assert caught.value.exit_code == 3


TRAINS = """
import sys, torch
rows = int(sys.argv[sys.argv.index("--bs") + 1]) if "--bs" in sys.argv else 500
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5): model(torch.randn(rows, 64)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The command that the refusal of a command line ends with."""
    assert run_memopt(["estimate", *words]) > 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("  try: ")
    return last.removeprefix("  try: ")


@pytest.mark.script
def test_a_gate_that_does_not_hold_ends_with_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINS)
    Path("gpu.py").write_text(
        TRAINS.replace("(8)])", "(8)]).cuda()").replace("rows, 64)", "rows, 64).cuda()")
    )
    gate = ("--fail-over", "800KB")
    told = refused(capsys, *gate, "--device", "cpu", "train.py", "--bs", "400")
    assert told == "memopt run --budget 800KB train.py --bs 400"
    done = subprocess.run([sys.executable, "-m", *shlex.split(told)], capture_output=True, text=True)
    assert done.returncode == 0
    assert "memopt: held" in done.stderr
    assert refused(capsys, *gate, "--device", "cpu", "-m", "train") == "memopt run --budget 800KB -m train"
    on_gpu = refused(capsys, *gate, "--device", "t4", "gpu.py", "--bs", "400")
    words = shlex.split(on_gpu)
    assert words[:4] == ["memopt", "estimate", "--device", "t4"]
    assert words[4] == "--fail-over"
    assert words[6:] == ["gpu.py", "--bs", "400"]
    assert run_memopt(words[1:]) == 0


def test_an_onnx_file_that_does_not_pass_the_gate_ends_with_a_gate_that_it_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "a model.onnx"
    model.write_bytes(b"")
    monkeypatch.setattr(
        "memopt.estimators.onnx.estimate.estimate_onnx",
        lambda *_, **settings: estimate_recording(recording(), find_device(settings["device"])),
    )
    told = refused(capsys, "--fail-over", "1MB", "--dim", "a=1", "--dim", "b=2", "--no-assume-bn", str(model))
    assert "--dim a=1 --dim b=2 --no-assume-bn" in told
    assert run_memopt(shlex.split(told)[1:]) == 0


def test_a_search_that_finds_no_batch_ends_with_a_command_that_works(
    canned: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("parser.add_argument('--test-batch'); parser.add_argument('--bs')")
    unnamed = refused(capsys, "--device", "t4", "--max-batch", "train.py", "--lr", "1")
    assert unnamed == "memopt estimate --device t4 --max-batch --batch-arg=--bs train.py --lr 1"
    assert run_memopt(shlex.split(unnamed)[1:]) == 0
    constant = refused(capsys, "--device", "t4", "--max-batch", "--batch-arg=--rows", "train.py")
    assert constant == "memopt estimate --device t4 --batch-arg=--rows --explain train.py"
    assert run_memopt(shlex.split(constant)[1:]) == 0
    monkeypatch.setattr(answers, "estimate_script", lambda argv, *, device, **_: estimate_recording(recording(
        200 * int(argv[-1])), find_device(device)))  # fmt: skip
    larger = refused(capsys, "--device", "rtx-4060", "--max-batch", "--batch-arg=--bs", "train.py")
    assert larger == "memopt estimate --device rtx-5090 --max-batch --batch-arg=--bs train.py"
    capsys.readouterr()


def test_the_largest_batch(canned: list[list[str]]) -> None:
    run("--device", "rtx-3060-12gb", "--max-batch", "--batch-arg=--bs", "train.py", "--bs", "3")
    tried = [int(argv[argv.index("--bs") + 1]) for argv in canned]
    spec = find_device("rtx-3060-12gb")

    def fits(size: int) -> bool:
        return batch_search.fits(estimate_recording(recording(size), spec))

    largest = max(n for n in tried if fits(n))
    assert not fits(largest + 1)
    assert tried == [1, 2, 4, 8, 16, 32, 64, 128, largest, largest + 1]  # the line finds the border at once
    assert all(argv.count("--bs") == 1 for argv in canned)
    with pytest.raises(UsageError, match="batch size"):
        run("--max-batch", "train.py")


def test_not_even_one_fits() -> None:
    spec = find_device("rtx-4060")
    with pytest.raises(NotPossibleHere, match="a batch of 1"):
        batch_search.largest_batch(lambda size: estimate_recording(recording(200), spec))
    small = estimate_recording(recording(), spec)

    def growing(size: int) -> Estimate:
        fits_named = small.fits_named if size <= 37 else None
        return replace(small, allocated_bytes=small.allocated_bytes + size, fits_named=fits_named)

    assert batch_search.largest_batch(growing)[0] == 37
    assert batch_search.largest_batch(growing, start=30)[0] == 37
    assert batch_search.largest_batch(growing, start=5000)[0] == 37
    with pytest.raises(NotPossibleHere, match="needs no more than a batch of 1"):
        batch_search.largest_batch(lambda size: small)


def test_a_flag_is_replaced_however_it_was_given() -> None:
    assert _with_flag(["t.py", "--bs", "3", "x"], "--bs", 8) == ["t.py", "x", "--bs", "8"]
    assert _with_flag(["t.py", "--bs=3"], "--bs", 8) == ["t.py", "--bs", "8"]


def test_what_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file"):
        run(str(tmp_path / "gone.onnx"))
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="--dim"):
        run("--dim", "seq", str(tmp_path / "bad.onnx"))
    with pytest.raises(UsageError, match="gives 'seq' two sizes, 4 and 5"):
        run("--dim", "seq=4", "--dim", "seq=5", str(tmp_path / "bad.onnx"))
    with pytest.raises(UsageError, match="not understood"):
        run(str(tmp_path / "bad.onnx"), "4")


def test_options_may_follow_a_file_but_not_a_script(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="--dim"):
        run(str(tmp_path / "bad.onnx"), "--batch-size", "4", "--dim", "seq")
    with pytest.raises(UsageError, match="cannot run"):
        run(str(tmp_path / "gone.py"), "--dim", "seq")


def test_a_typo_is_not_taken_for_a_script() -> None:
    import click

    with pytest.raises(click.NoSuchOption):
        run("--jsno", "train.py")


def test_the_command_imports_no_torch() -> None:
    code = "import sys; import memopt.cli.estimate; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])  # fmt: skip
    assert ran.stdout.strip() == "False"


def test_error_bars_are_as_wide_as_what_was_measured_of_such_runs() -> None:
    plain = recording()
    convolved = replace(plain, rows=[*plain.rows, StorageRow(0, "", "forward", "", "convolution.default", 3)])
    recurrent = replace(
        plain, rows=[*plain.rows, StorageRow(0, "", "forward", "", "cuDNN recurrent layer", 3)]
    )
    found = [error_bar(each) for each in (replace(convolved, target="cpu"), plain, recurrent, convolved)]
    assert [bar.kind for bar in found] == ["cpu", "gpu", "gpu recurrent", "gpu convolution"]
    assert [bar.reserved for bar in found] == sorted(bar.reserved for bar in found)
    h200 = find_device("h200")
    assert estimate_recording(convolved, h200).error["reserved"] == error_bar(convolved).reserved
    assert all(len(bar.source) > 20 for bar in error_bars().values())


@pytest.mark.parametrize(
    ("source", "words", "told"),
    [
        ("print(1)", ["--device", "cpu"], True),
        ("parser.add_argument('--device')", ["--device=cpu"], False),
        ("class Arguments:\n    batch_size: int = 8", ["--batch-size", "4"], False),
        ("print(1)", ["--lr", "0.1"], False),
    ],
)
def test_an_option_of_ours_that_went_to_the_script_is_told(
    canned: list[list[str]], tmp_path: Path, source: str, words: list[str], told: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    result = CliRunner().invoke(group, ["estimate", str(script), *words], standalone_mode=False)
    assert result.exception is None
    assert canned == [[str(script), *words]]
    assert ("options of memopt come before the script" in result.stderr) == told


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("plan.json", '{"schema": "memopt.plan/1"}', "plan.json is not a profile\n  it is a plan"),
        ("notes.json", '{"a": 1}', "is not a profile"),
        ("weights.pt", "PK", "neither a script nor an ONNX model nor a profile"),
        ("snapshot.pickle", "\x80\x04.", "memopt profile --from-snapshot"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_not_run(
    tmp_path: Path, name: str, content: str, told: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(MemoptError) as caught:
        run(str(tmp_path / name))
    assert told in str(caught.value)
    assert caught.value.why
    assert caught.value.try_


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--batch-size", "8", "train.py"), "--batch-size changes nothing for a script"),
        (("--optimizer", "sgd", "-m", "train"), "--optimizer changes nothing for a script"),
        (("run.profile.json.gz", "--dtype", "bf16"), "--dtype changes nothing for a profile"),
        (("model.onnx", "--batch-arg", "x"), "--batch-arg changes nothing for an ONNX model"),
    ],
)
def test_an_option_without_effect_is_refused(
    canned: list[list[str]], tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "run.profile.json.gz").touch()
    (tmp_path / "model.onnx").touch()
    names = {path.name: str(path) for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=told):
        run(*(names.get(word, word) for word in words))
    assert not canned


def test_the_value_of_an_option_is_not_taken_for_the_target(canned: list[list[str]]) -> None:
    run("--batch-arg", "gpu.json", "train.py", "--device", "x")
    assert canned == [["train.py", "--device", "x"]]


def convolved(size: int, possible: int) -> Recording:
    """A weight of 100 MiB, a temporary of `size` MiB that dies again, and `possible` MiB that may be taken while both live."""
    rows = [
        StorageRow(100 * MIB, "parameter", "forward", "Net", "made", 0),
        StorageRow(size * MIB, "activation", "forward", "Net.layer", "convolution", 1),
    ]
    return Recording(
        target="cuda",
        rows=rows,
        events=[1, 2, -2],
        marks=[("step", 3)],
        possible=[(2, possible * MIB)],
        possible_bytes=possible * MIB,
    )


def test_what_may_come_on_top_is_in_the_upper_bound_and_must_fit() -> None:
    spec = msgspec.structs.replace(find_device("t4"), memory_bytes=1000 * MIB)
    found = estimate_recording(convolved(40, 60), spec, context_bytes=0)
    assert found.allocated_bytes == 140 * MIB
    assert (
        found.most_bytes["allocated"]
        == found.most_bytes["reserved"]
        == found.most_bytes["smallest"]
        == 200 * MIB
    )
    verdicts = [
        estimate_recording(convolved(40, possible), spec, context_bytes=0).fits_named.verdict  # type: ignore[union-attr]
        for possible in (860, 861)
    ]
    assert verdicts == ["yes", "no"]
    assert not batch_search.fits(estimate_recording(convolved(40, 861), spec, context_bytes=0))


def test_a_gate_holds_only_where_the_upper_bound_does(
    canned: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_device("a100-40gb")
    found = estimate_recording(convolved(40, 60), spec, context_bytes=0)
    monkeypatch.setattr("memopt.estimators.estimate.estimate_script", lambda *args, **kwargs: found)
    assert run("--fail-over", "200MiB", "train.py")
    with pytest.raises(
        GateFailed, match=r"needs up to 200 MiB .140 MiB told, the rest left out., more than 199 MiB"
    ):
        run("--fail-over", "199MiB", "train.py")


def test_the_range_is_printed_where_it_is_wider_than_the_error_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = estimate_recording(convolved(100, 60), find_device("a100-40gb"), context_bytes=0)
    print_estimate(Console(width=200), found, "train.py")
    assert "-12.0 % +30.0 %" in capsys.readouterr().out


def test_possible_workspaces_keep_the_order_of_marks() -> None:
    recording = replace(
        convolved(40, 60), marks=[("backward", 2), ("empty_cache", 3)], possible=[(2, 60 * MIB), (3, 1)]
    )
    most = recording.at_most()
    assert most.events == [1, 2, 3, -3, -2, 4, -4]
    assert most.marks == [("backward", 2), ("empty_cache", 5)]
    assert most.peak()[0] == 200 * MIB


@pytest.mark.script
def test_a_script_that_trains_on_the_cpu_is_refused_before_any_figure(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.randn(8, 64)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    with pytest.raises(NotPossibleHere, match="put nothing on the GPU") as refused:
        run("--fail-over", "1GB", "--device", "t4", str(script))
    assert refused.value.try_ == f"memopt estimate --device cpu {script}"


@pytest.mark.script
def test_a_script_that_makes_no_tensor_passes_no_gate(tmp_path: Path) -> None:
    (tmp_path / "starts_others.py").write_text("print('done elsewhere')")
    with pytest.raises(NotPossibleHere, match="made no tensor"):
        run("--fail-over", "1GB", "--device", "cpu", str(tmp_path / "starts_others.py"))


def test_a_gate_of_a_few_bytes_was_hardly_meant(canned: list[list[str]]) -> None:
    with pytest.raises(UsageError, match="--fail-over 16 is 16 bytes"):
        run("--fail-over", "16", "train.py")
    assert not canned


@pytest.mark.parametrize("lacks", [[], ["its dropouts"]])
def test_an_estimate_that_lacks_something_is_a_lower_bound(lacks: list[str]) -> None:
    found = estimate_recording(replace(recording(), lacks=lacks), find_device("a100-40gb"))
    assert (found.lacks, [each for each in found.left_out if each in lacks]) == (lacks, lacks)
    console = Console(width=100, record=True)
    print_estimate(console, found, "model.onnx")
    text = console.export_text()
    assert (" %, or more" in text) is bool(lacks)
    assert ("±" in text) is not bool(lacks)


TRAINED = {
    "other tensors": (
        "for step in range(4):\n"
        "    (torch.randn(8, 8).cuda() * 2).sum().item()\n"
        "    model(torch.randn(64, 1024)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()\n"
    ),
    "the loss": (
        "for step in range(4):\n"
        "    model(torch.randn(64, 1024)).square().mean().cuda().backward(); optimizer.step(); optimizer.zero_grad()\n"
    ),
}
"""What of a script that trains on the CPU is on the GPU."""


@pytest.mark.parametrize("there", TRAINED)
@pytest.mark.script
def test_a_model_that_stays_on_the_cpu_is_refused_whatever_else_is_on_the_gpu(
    there: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n" + TRAINED[there]
    )
    with pytest.raises(NotPossibleHere, match="the script trains on the CPU: there is nothing to") as refused:
        run("--fail-over", "1GB", "--device", "t4", str(script))
    assert refused.value.try_ == f"memopt estimate --device cpu {script}"


OFFLOADED = {
    "the optimizer's step": (
        "model = layers.cuda().bfloat16()\n"
        "masters = [each.detach().float().cpu().requires_grad_() for each in model.parameters()]\n"
        "optimizer = torch.optim.AdamW(masters)\n"
        "def step():\n"
        "    model(torch.randn(64, 1024, device='cuda', dtype=torch.bfloat16)).square().mean().backward()\n"
        "    for master, each in zip(masters, model.parameters()): master.grad = each.grad.float().cpu()\n"
    ),
    "the weights": (
        "optimizer = torch.optim.SGD(layers.parameters(), 0.1)\n"
        "def step():\n"
        "    x = torch.randn(64, 1024, device='cuda')\n"
        "    for each in layers: x = torch.nn.functional.linear(x, each.weight.cuda(), each.bias.cuda()).relu()\n"
        "    x.square().mean().backward()\n"
    ),
    "half of the layers": (
        "optimizer = torch.optim.SGD(layers.parameters(), 0.1)\n"
        "layers[2:].cuda()\n"
        "def step(): layers[2:](layers[:2](torch.randn(64, 1024)).cuda()).square().mean().backward()\n"
    ),
    "all but a frozen model": (
        "frozen = torch.nn.Linear(1024, 1024).requires_grad_(False).cuda()\n"
        "optimizer = torch.optim.SGD(layers.parameters(), 0.1)\n"
        "def step(): layers(frozen(torch.randn(64, 1024).cuda()).cpu()).square().mean().backward()\n"
    ),
}
"""What is done on the CPU where the GPU has a share in the training."""


@pytest.mark.parametrize("what", OFFLOADED)
@pytest.mark.script
def test_a_share_of_the_training_on_the_gpu_is_estimated(what: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])\n"
        + OFFLOADED[what]
        + "for _ in range(4): step(); optimizer.step(); optimizer.zero_grad()\n"
    )
    told = run("--fail-over", "1GB", "--device", "t4", str(script))
    assert "fits on t4" in told
    assert "no parameter was put on the GPU" not in told


def test_a_model_that_stays_on_the_cpu_is_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [replace(row, category="activation") for row in recording().rows]
    idle = replace(recording(), rows=rows, backward_elsewhere=True)
    found = estimate_recording(idle, find_device("t4"))
    assert found.notes[0].startswith("no parameter was put on the GPU: the model trains on the CPU")
    assert not any(
        "no parameter" in note for note in estimate_recording(recording(), find_device("t4")).notes
    )
