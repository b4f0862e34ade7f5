"""What we write for Perfetto, read by Perfetto's own trace processor and asked in its own language."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memopt.profiler.out_of_memory import trace_of_now
from memopt.reports import frames
from memopt.reports.formats.export import exported
from memopt.reports.inputs import Inputs, Run, read_inputs, with_a_moment
from memopt.trace import PHASES, Script, Trace
from tests.estimators.test_snapshot import snapshot_of
from tests.support.browser import chromium, needs_browser
from tests.support.large_trace import large_trace
from tests.support.toy_trace import toy_trace
from tests.support.trace_processor import trace_processor

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def written(*traces: Trace) -> bytes:
    return exported(Inputs(runs=[Run("toy", with_a_moment(trace)) for trace in traces]), ["toy"], "perfetto")


def test_every_op_counter_and_tensor_arrives(browser: Any) -> None:
    trace = toy_trace()
    with trace_processor(browser, written(trace)) as found:
        assert found.query("select name, value from stats where value > 0 and severity != 'info'") == []
        slices = found.query(
            "select slice.name, slice.category, thread.name as row, extract_arg(slice.arg_set_id, 'args.op') as op,"
            " extract_arg(slice.arg_set_id, 'args.line') as line from slice join thread_track on slice.track_id ="
            " thread_track.id join thread using (utid) order by op"
        )
        assert [(each["name"], each["op"]) for each in slices] == [
            (trace.op_name(op), op) for op in range(trace.op_count)
        ]
        assert [each["row"] for each in slices] == [PHASES[phase] for phase in trace.ops.phase]
        assert [each["line"] or "" for each in slices] == [trace.strings[line] for line in trace.ops.line]
        counted = found.query(
            "select ts, sum(value) as bytes from counter join counter_track on track_id = counter_track.id group by ts order by ts"
        )
        assert [each["bytes"] for each in counted] == frames.high_bytes(trace).tolist()
        spans = found.query("select name, dur from slice where category = 'tensor'")
        assert len(spans) == trace.storage_count
        assert all(each["dur"] >= 0 for each in spans), "a tensor that was never closed"
        assert found.query("select name from process where name is not null") == [{"name": "memopt: toy"}]


def test_ops_of_a_row_never_overlap(browser: Any) -> None:
    """Overlapping slices would be nested one in the other, or dropped."""
    trace = large_trace(500)
    with trace_processor(browser, written(trace)) as found:
        assert found.query(
            "select count(*) as n, max(depth) as depth from slice where category != 'tensor'"
        ) == [{"n": trace.op_count, "depth": 0}]


def test_names_arrive_as_they_are(browser: Any) -> None:
    trace = toy_trace()
    evil = '</script>"\\ \u202e" %s {"ph":"X"}'
    strings = [text.replace("Net.fc", evil) for text in trace.strings]
    with trace_processor(browser, written(msgspec.structs.replace(trace, strings=strings))) as found:
        modules = found.query("select extract_arg(arg_set_id, 'args.module') as module from slice")
        assert any("</script>" in (each["module"] or "") for each in modules)
        assert found.query("select count(*) as n from slice where category != 'tensor'") == [
            {"n": trace.op_count}
        ]


def test_a_snapshot_and_a_run_that_died_load_too(browser: Any, tmp_path: Path) -> None:
    died = trace_of_now(Script(argv=["train.py"], cwd="/"), "the script ran out of memory", "train.py:7")
    inputs = read_inputs([snapshot_of(tmp_path, "medium_512_inference")])
    for data in (written(died), exported(inputs, ["x"], "perfetto")):
        with trace_processor(browser, data) as found:
            assert found.query("select name, value from stats where value > 0 and severity != 'info'") == []
            assert found.query("select count(*) as n from slice")[0]["n"] > 0
