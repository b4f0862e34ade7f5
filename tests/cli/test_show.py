"""Terminal reports and `memopt show`: exact figures on a toy trace, tables that never cut a number, bad files."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from memopt.cli.main import run as run_memopt
from memopt.errors import BadFile
from memopt.files import unpack
from memopt.outcome import Outcome
from memopt.plan import Action, OpRef, Plan
from memopt.reports.area import slices_of
from memopt.reports.formats.summary import summarize_plan, summarize_trace
from memopt.reports.outcome import render_outcome, render_ranks
from memopt.reports.page.moment import Moment, end_of, open_paths, peak_of
from memopt.reports.tables import shorten, shorten_label, words
from memopt.reports.terminal import render_plan, render_trace
from memopt.reports.verdict import of_peak
from memopt.trace import Trace
from memopt.units import format_change
from tests.support.toy_trace import toy_trace

OUTCOME = {
    "budget_bytes": 7000, "unplanned_peak_bytes": 8900, "predicted_peak_bytes": 6800, "measured_peak_bytes": 6900,
    "plain_step_ms": 10.0, "predicted_step_ms": 11.0, "measured_step_ms": 12.2,
    "actions": {"planned": 3, "done": 2, "skipped": 1}, "divergences": 0,
}  # fmt: skip


def toy_plan(count: int = 3) -> Plan:
    trace = toy_trace()
    actions = [
        Action(
            kind="recompute", storage=4, label=trace.storage_label(4), size_bytes=4000, slots=[], why="made again in 10 µs",
            saved_bytes=1000 * (number + 1), cost_ms=0.01, records=[OpRef(module="Net.fc#0", ordinal=0, name="addmm")],
        )
        for number in range(count)
    ]  # fmt: skip
    return Plan(
        memopt="0", created="", script=trace.script, device=trace.device, profile="p.json.gz", strategy="auto",
        budget_bytes=7000, unplanned_peak_bytes=8900, predicted_peak_bytes=6800, plain_step_ms=10.0,
        predicted_step_ms=11.0, actions=actions,
    )  # fmt: skip


def drawn(what: RenderableType, width: int = 80, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    Console(file=file, width=width, highlight=False, markup=False, emoji=False).print(what)
    file.seek(0)
    return file.read()


# --- the moment


def test_the_peak_is_made_of_what_is_alive_then() -> None:
    peak = peak_of(toy_trace())
    assert (peak.op, peak.total_bytes, peak.named_bytes, peak.workspace_bytes) == (3, 8900, 8800, 100)
    assert peak.by_category == {
        "activation": 4000, "optimizer state": 2000, "parameter": 1000, "gradient": 1000,
        "temporary": 500, "input": 300, "workspace": 100,
    }  # fmt: skip
    assert sum(peak.by_category.values()) == peak.total_bytes
    assert peak.from_before_bytes == 3300
    assert peak.by_line == {"net.py:3": 4500, "train.py:7": 1000}
    assert peak.by_module(10) == {"Net.fc": 8500, "": 300}


def test_a_moment_knows_who_is_alive() -> None:
    trace = toy_trace()
    alive = [sorted(held.storage for held in Moment(trace, op, 10**4).held) for op in range(4)]
    assert alive == [[0, 2, 3, 4], [0, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 6]]


def test_idle_time_is_from_the_last_other_holder_to_the_first_use() -> None:
    """Gone after op 1 (30 µs), asked for before op 3 starts (60 µs)."""
    activation = peak_of(toy_trace()).held[0]
    assert activation.storage == 4
    assert activation.idle_ms == pytest.approx(0.03)


def test_where_a_partial_recording_was_cut_off() -> None:
    assert end_of(toy_trace(facts={"stopped_at_op": 1})) is None
    end = end_of(toy_trace(facts={"stopped_at_op": 1}, partial="it ran out of memory"))
    assert end is not None
    assert (end.op, end.total_bytes, end.workspace_bytes) == (1, 8000, 0)
    assert end_of(toy_trace(facts={"stopped_at_op": 99}, partial="hostile")) is None


def test_a_trace_without_ops_shows_what_was_there() -> None:
    trace = without_ops()
    peak = peak_of(trace)
    assert (peak.op, peak.by_category) == (-1, {"optimizer state": 2000, "parameter": 1000, "input": 300})
    assert "3.22 KiB" in drawn(render_trace(trace))
    assert summarize_trace(trace)["categories_at_peak"] == peak.by_category


def without_ops() -> Trace:
    trace = toy_trace()
    empty = {name: type(value)(**{f: getattr(value, f)[:0] if isinstance(getattr(value, f), list) else type(getattr(value, f)).of([]) for f in value.__struct_fields__}) for name, value in (("ops", trace.ops), ("slots", trace.slots))}  # fmt: skip
    keep = [0, 2, 3]
    storages = type(trace.storages)(**{f: [column[i] for i in keep] for f in trace.storages.__struct_fields__ if (column := getattr(trace.storages, f))} | {"death_op": [0] * 3, "only_saved_from": [-1] * 3})  # fmt: skip
    values = type(trace.values)(storage=[0, 1, 2], producer=[-1] * 3, output=[-1] * 3)
    return toy_trace(
        **empty, storages=storages, values=values, peak_bytes=3300, partial="it ran out of memory"
    )


paths = st.lists(
    st.tuples(st.sampled_from(["", "a", "a.b", "a.b.c", "a.d", "a.b.e.f", "x", "x.y"]), st.integers(0, 99))
)


@given(paths, st.integers(1, 5))
def test_opening_paths_loses_nothing(sizes: list[tuple[str, int]], most: int) -> None:
    opened = open_paths(sizes, most)
    assert sum(opened.values()) == sum(size for _, size in sizes)
    assert all(any(path == name or path.startswith(f"{name}.") for path, _ in sizes) for name in opened)
    assert list(opened.values()) == sorted(opened.values(), reverse=True)


def test_paths_open_where_the_bytes_are() -> None:
    layers = [(f"net.layers.{i}.fc", 10) for i in range(3)]
    assert open_paths([*layers, ("net.head", 1), ("", 5)], 8) == {
        "net.layers.0.fc": 10, "net.layers.1.fc": 10, "net.layers.2.fc": 10, "": 5, "net.head": 1,
    }  # fmt: skip
    assert open_paths([(f"net.{i}", 1) for i in range(50)], 4).keys() == {f"net.{i}" for i in range(50)}


# --- words and pictures


def test_the_verdict_says_how_much_where_and_of_what() -> None:
    trace = toy_trace()
    assert of_peak(trace, peak_of(trace)) == (
        "Peak 8.69 KiB at op 3/4 (backward of Net.fc, mm, net.py:3); "
        "45 % activations, 22 % optimizer state, 11 % parameters."
    )


def test_change_in_percent() -> None:
    assert [
        format_change(66, 100),
        format_change(101.25, 100),
        format_change(100, 100),
        format_change(5, 0),
    ] == [
        "-34 %",
        "+1.2 %",
        "no change",
        "n/a",
    ]


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.floats(0, 100)), min_size=1, max_size=60),
    st.integers(1, 40),
)
def test_the_peak_survives_any_thinning(ops: list[tuple[int, int, float]], width: int) -> None:
    high, phase, times = (list(column) for column in zip(*ops, strict=True))
    slices = slices_of(high, phase, times, width)
    assert len(slices) == width
    assert max(size for size, _ in slices) == max(high)


@given(st.text(max_size=40), st.integers(1, 40))
def test_names_shrink_from_the_left(text: str, width: int) -> None:
    short, whole = shorten(text, width), words(text).plain
    assert short.cell_len <= width
    assert short.plain == whole or (short.plain.startswith("…") and whole.endswith(short.plain[1:]))


def test_a_label_cannot_speak_to_the_terminal() -> None:
    trace = toy_trace()
    hostile = [text.replace("Net", "\x1b]0;owned\x07\x1b[31m") for text in trace.strings]
    assert "\x1b" not in drawn(render_trace(toy_trace(strings=hostile, notes=["\x1b[2J"])))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_number_is_cut(width: int) -> None:
    text = drawn(render_trace(toy_trace()), width)
    for number in ("3.91 KiB", "44.9 %", "1.95 KiB", "8.69 KiB", *(["op 0", "30 µs"] if width >= 80 else [])):
        assert number in text
    assert max(map(len, text.splitlines())) <= width
    assert width < 60 or "… " not in text


def test_reports_fit_a_terminal_without_utf8() -> None:
    text = drawn(render_trace(toy_trace()), encoding="ascii")
    assert "####" in text
    assert "44.9 %" in text


def test_plan_report() -> None:
    text = drawn(render_plan(toy_plan(), top=2))
    assert "Peak 6.64 KiB instead of 8.69 KiB (-24 %), within the budget of 6.84 KiB" in text
    assert "step 11.0 ms instead of 10.0 ms (+10 %)" in " ".join(text.split())
    assert "made again in 10 µs" in text
    assert "×3" in text  # one row, since they are alike
    totals = next(line for line in text.splitlines() if line.strip().startswith("recompute "))
    assert totals.split() == ["recompute", "3", "11.7", "KiB", "5.86", "KiB", "30", "µs"]


def test_outcome_report_of_a_dict_and_of_a_struct() -> None:
    text = drawn(render_outcome(OUTCOME))
    assert text == drawn(render_outcome(msgspec.convert(OUTCOME, Outcome)))
    assert "within the budget of 6.84 KiB; without the plan 8.69 KiB" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["peak", "8.69", "KiB", "6.64", "KiB", "6.74", "KiB", "+1.5", "%"] in rows
    assert ["step", "10.0", "ms", "11.0", "ms", "12.2", "ms", "+11", "%"] in rows
    assert "3 planned, 2 done, 1 skipped" in text


def test_ranks_within_the_budget_say_of_what() -> None:
    plain = msgspec.convert(OUTCOME, Outcome)
    outside = msgspec.structs.replace(plain, outside_peak_bytes=9000)
    assert drawn(render_ranks({0: plain, 1: plain}, 2)).startswith("Ranks 0, 1 within the budget.")
    said = " ".join(drawn(render_ranks({0: plain, 1: outside}, 2)).split())
    assert (
        "within the budget in the measured iterations; elsewhere (loading, evaluation) a rank held about 8.79 KiB."
        in said
    )


def test_outcome_above_the_budget_says_so() -> None:
    assert "600 B ABOVE the budget" in drawn(render_outcome(OUTCOME | {"measured_peak_bytes": 7600}))
    assert "Nothing was measured" in drawn(render_outcome(OUTCOME | {"measured_peak_bytes": None}))


# --- the command


def write(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return write(tmp_path, "any.name", toy_trace().encode())


def test_show_json_of_a_profile(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_memopt(["show", "--json", profile]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {name: shown[name] for name in ("peak_bytes", "peak_op", "step_ms", "ops", "storages")} == {
        "peak_bytes": 8900, "peak_op": 3, "step_ms": 0.1, "ops": 4, "storages": 7,
    }  # fmt: skip
    assert sum(shown["categories_at_peak"].values()) == shown["peak_bytes"]
    assert shown["ops_by_phase"] == {"forward": 2, "backward": 2}


def test_show_a_plan_by_what_is_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.profile.json.gz"
    toy_plan().save(path)
    assert run_memopt(["show", str(path)]) == 0
    assert "plan by auto" in capsys.readouterr().out
    assert summarize_plan(toy_plan())["actions_by_kind"] == {"recompute": 3}


def test_top_limits_the_rows(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_memopt(["show", "--top", "2", profile]) == 0
    assert "(4 more)" in capsys.readouterr().out


def test_show_help_names_its_options() -> None:
    from memopt.cli.main import group

    text = CliRunner().invoke(group, ["show", "--help"]).output
    assert "--json" in text
    assert "--top" in text


whole = toy_trace().encode()


def _with_text(text: str) -> bytes:
    """The toy trace, whose first slot has the attributes `text`."""
    trace = json.loads(gzip.decompress(whole))
    trace["slots"]["attributes"][0] = len(trace["strings"])
    trace["strings"].append(text)
    return gzip.compress(json.dumps(trace).encode())


spaces = gzip.compress(b" " * 2**27)
BAD = {
    "a broken stream": whole[:60] + b"\x00" * 40 + whole[100:],
    "a bomb": spaces,
    "an escape sequence": b'{"schema": "\\u001b[31mred"}',
    "empty": b"",
    "truncated": whole[: len(whole) // 2],
    "binary": b"\x00\x01\x02",
    "a list": b"[1, 2]",
    "nested": b"[" * 100_000,
    "no schema": b"{}",
    "other schema": b'{"schema": "grafana/1"}',
    "newer": b'{"schema": "memopt.trace/99"}',
    "newer plan": b'{"schema": "memopt.plan/2"}',
    "schema only": b'{"schema": "memopt.trace/1"}',
    "negative": gzip.compress(gzip.decompress(whole).replace(b'"peak_bytes":8900', b'"peak_bytes":-1')),
    "huge": gzip.compress(gzip.decompress(whole).replace(b'"step_ms":0.1', b'"step_ms":1e308')),
    "infinite": gzip.compress(gzip.decompress(whole).replace(b'"step_ms":0.1', b'"step_ms":NaN')),
    "attributes that are no JSON": _with_text("{dim: 1}"),
    "attributes that are a list": _with_text("[1]"),
    "attributes without an end": _with_text("{" + '"a":{' * 10_000),
    "a huge name": _with_text('{"a": "' + "x" * 10**6 + '"}'),
    "a huge argument": gzip.compress(
        gzip.decompress(whole).replace(b'"argv":[', b'"argv":["' + b"x" * 10**6 + b'",')
    ),
    "unknown storage": gzip.compress(gzip.decompress(whole).replace(b'"storage":[4]', b'"storage":[44]')),
}


ADDRESSED = 2**56
"""Bytes that a process can address."""
HUGE = {
    "storages.size_bytes holds": {"storages": {"size_bytes": [ADDRESSED] * 7}},
    "storages.size_bytes add up to": {
        "storages": {
            name: [ADDRESSED - 1] * 70 if name == "size_bytes" else column * 10
            for name, column in json.loads(gzip.decompress(whole))["storages"].items()
            if column is not None
        }
    },
    "ops.live_bytes holds": {"ops": {"live_bytes": [0, 0, 0, ADDRESSED]}},
    "slot 0 is of a tensor with more elements": {
        "slots": {"shape": {"starts": [0, 3], "items": [2**20] * 3}, "stride": {"starts": [0, 3], "items": [0] * 3}}
    },
    "or elements further apart": {"slots": {"stride": {"starts": [0, 1], "items": [ADDRESSED]}}},
    "slots.stride holds": {"slots": {"stride": {"starts": [0, 1], "items": [-1]}}},
    "elements further apart, than any memory has": {"slots": {"offset": [ADDRESSED]}},
}  # fmt: skip
"""What is said of columns that planners could not add up."""


@pytest.mark.parametrize("said", HUGE)
def test_sizes_that_no_memory_has_are_one_clear_error(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = json.loads(gzip.decompress(whole))
    for table, columns in HUGE[said].items():
        trace[table] |= columns
    assert run_memopt(["show", write(tmp_path, "file", json.dumps(trace).encode())]) == BadFile.exit_code
    told = " ".join(capsys.readouterr().err.split())
    assert said in told
    assert "try: memopt profile SCRIPT, to record it again" in told


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_clear_error(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_memopt(["show", write(tmp_path, "file", BAD[name])]) == BadFile.exit_code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("memopt: ")
    assert "\n  try: " in told.err
    assert "Traceback" not in told.err
    assert "\x1b" not in told.err


def test_a_bomb_is_not_unpacked_to_its_end() -> None:
    with pytest.raises(BadFile, match="unpack to more than 83886080"):  # 64 MiB and one chunk, of 128 MiB
        unpack(spaces, Path("x"), "profile")


def test_a_device_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_memopt(["show", "/dev/zero"]) == 2
    assert "a device or a pipe" in capsys.readouterr().err


@pytest.mark.parametrize("args", [(), ("--json",)])
def test_the_c_locale_can_read_a_profile(profile: str, args: tuple[str, ...]) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), "LC_ALL": "C"}
    strict = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "memopt", "show", *args, profile]
    done = subprocess.run(command, capture_output=True, env=env | strict, timeout=60)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert json.loads(text)["biggest_at_peak"] if args else "44.9 %" in text


@pytest.mark.parametrize(
    ("width", "short"),
    [
        (40, "Net.blocks.3.mlp · gelu · 4×1024 fp32"),
        (35, "….blocks.3.mlp · gelu · 4×1024 fp32"),
        (28, "Net.blocks.3.mlp · gelu"),
        (20, "…blocks.3.mlp · gelu"),
        (16, "Net.blocks.3.mlp"),
        (8, "…s.3.mlp"),
    ],
)
def test_a_label_gives_up_its_shape_before_its_place(width: int, short: str) -> None:
    found = shorten_label("Net.blocks.3.mlp · gelu · 4×1024 fp32", width)
    assert found.cell_len <= width
    assert found.plain == short


def test_a_narrow_terminal_has_room_for_the_reasons() -> None:
    text = drawn(render_plan(toy_plan(), top=2), 60)
    assert "recompute (1 op): made again in 10 µs" in text
    assert max(map(len, text.splitlines())) <= 60


def test_missing_file_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "nosuch", tmp_path):
        assert run_memopt(["show", str(path)]) == 2
        assert capsys.readouterr().out == ""
