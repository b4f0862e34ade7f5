"""The page in a real browser, offline: what it shows, what can be done with it by mouse and by keyboard, what it must never do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memopt.advisors.profiles.plan_reader import read_plan
from memopt.errors import MemoptError
from memopt.plan import load_plan
from memopt.profiler.out_of_memory import trace_of_now
from memopt.reports.inputs import read_inputs
from memopt.reports.page.html import page as page_of
from memopt.reports.page.moment import peak_of
from memopt.trace import Script, Trace, load_trace
from memopt.units import format_bytes
from tests.estimators.test_snapshot import snapshot_of
from tests.support.browser import chromium, needs_browser, opened
from tests.support.large_trace import large_trace
from tests.support.profiled import profiler
from tests.support.toy_trace import toy_trace

pytestmark = needs_browser
ROOT = Path(__file__).parents[2]
SERIOUS = ("serious", "critical")
NARROW = {"width": 390, "height": 844}

OUT_OF_MEMORY = """
import torch
from torch import nn
net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)])
x = torch.randn(512, 256)
for layer in net:
    x = layer(x)
raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with real profiles, a plan, its outcome and a run that died."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "oom.py").write_text(OUT_OF_MEMORY)
    examples, scripts = ROOT / "examples", ROOT / "tests" / "scripts"
    with profiler(folder) as run:
        for args in (
            ("profile", "-o", "gpt.profile.json.gz", f"{examples}/char_gpt.py", "--steps", "6"),
            ("profile", "-o", "gan.profile.json.gz", f"{scripts}/gan.py"),
            ("profile", "-o", "checkpointed.profile.json.gz", f"{scripts}/checkpointed.py"),
            ("profile", "-o", "died.profile.json.gz", "oom.py"),
            ("advise", "gpt.profile.json.gz", "--budget", "60%", "--time-limit", "1", "-o", "gpt.plan.json"),
            ("apply", "gpt.plan.json", "--outcome", "gpt.outcome.json"),
        ):
            done = run.memopt(*args)
            assert done["returncode"] == (1 if "oom.py" in args else 0), done["stderr"]
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def html(folder: Path, *names: str, **options: Any) -> Path:
    """The page for the files of `folder` called `names`."""
    path = folder / f"{'-'.join(names).replace('.', '_')}.html"
    path.write_text(page_of(read_inputs([folder / name for name in names]), names, **options))
    return path


def made(folder: Path, trace: Trace, name: str = "made.profile.json.gz") -> Path:
    trace.save(folder / name)
    return html(folder, name)


@pytest.mark.parametrize(
    "names",
    [
        ("gpt.profile.json.gz",),
        ("gan.profile.json.gz",),
        ("checkpointed.profile.json.gz",),
        ("died.profile.json.gz",),
        ("gpt.plan.json", "gpt.outcome.json"),
        ("gan.profile.json.gz", "checkpointed.profile.json.gz"),
        ("gpt.outcome.json",),
    ],
    ids=lambda names: " ".join(name.partition(".json")[0] for name in names),
)
def test_pages_open_offline_and_are_accessible(files: Path, browser: Any, names: tuple[str, ...]) -> None:
    with opened(browser, html(files, *names), color_scheme="light", bypass_csp=True) as found:
        without_faults(found.page)
        found.page.emulate_media(color_scheme="dark")
        without_faults(found.page)
        found.page.set_viewport_size(NARROW)
        found.page.emulate_media(color_scheme="light")
        without_faults(found.page)


def test_a_page_opens_on_a_telephone_in_the_dark(files: Path, browser: Any) -> None:
    path = html(files, "gpt.plan.json", "gpt.outcome.json")
    with opened(browser, path, color_scheme="dark", viewport=NARROW, bypass_csp=True) as found:
        without_faults(found.page)


def without_faults(page: Any) -> None:
    """The accessibility checker axe finds nothing serious, and the page itself never scrolls sideways."""
    from axe_playwright_python.sync_playwright import Axe

    page.wait_for_timeout(200)  # what follows the window's size follows a little later
    faults = [each for each in Axe().run(page).response["violations"] if each["impact"] in SERIOUS]
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in faults] == []
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0


def test_the_verdict_and_the_figures_are_those_of_the_files(files: Path, browser: Any) -> None:
    plan, trace = load_plan(files / "gpt.plan.json"), load_trace(files / "gpt.profile.json.gz")
    outcome = json.loads((files / "gpt.outcome.json").read_text())
    with opened(browser, html(files, "gpt.plan.json", "gpt.outcome.json")) as found:
        text = found.text(".hero").replace("\u00a0", " ")
        for size in (
            plan.predicted_peak_bytes,
            trace.peak_bytes,
            plan.budget_bytes,
            outcome["measured_peak_bytes"],
        ):
            assert format_bytes(size) in text
        assert "char_gpt.py --steps 6" in text
        assert found.text("#key").split("\n")[:2] == [
            "activation",
            format_bytes(peak_of(trace).by_category["activation"]),
        ]


def test_a_run_that_died_says_what_filled_the_device(files: Path, browser: Any) -> None:
    with opened(browser, html(files, "died.profile.json.gz")) as found:
        assert found.text("h1").startswith("Out of memory, with ")
        assert "Tried to allocate 8.00" in found.text(".hero").replace("\u00a0", " ")
        assert found.page.locator("#rows tr.row").count() > 5
        assert "when it ended" in found.text("#strip-card-title") or "at the peak" in found.text(
            "#strip-card-title"
        )


def test_another_moment_changes_all_that_follows_it(files: Path, browser: Any) -> None:
    trace = load_trace(files / "gpt.profile.json.gz")
    with opened(browser, html(files, "gpt.profile.json.gz")) as found:
        peak = peak_of(trace).op
        assert f"op {peak} of {trace.op_count}" in found.text(".moment")
        before = found.text("#table-note")
        found.page.focus("#moment-slider")
        found.page.keyboard.press("Home")
        assert f"op 0 of {trace.op_count}" in found.text(".moment")
        assert found.text("#table-note") != before
        assert "op=0" in found.page.url
        found.page.keyboard.press("ArrowRight")
        assert "op=1" in found.page.url
        found.page.click("[data-do=peak]")
        assert "op=" not in found.page.url
        assert found.text("#table-note") == before


def test_a_click_into_the_picture_chooses_that_moment(files: Path, browser: Any) -> None:
    with opened(browser, html(files, "gpt.profile.json.gz")) as found:
        found.page.locator("#area").scroll_into_view_if_needed()
        # a click counts once the picture has seen the mouse move to where it is, which takes a busy browser a while
        for attempt in range(10):
            box = found.page.locator("#area .nsewdrag").first.bounding_box()
            x, y = box["x"] + box["width"] * 0.2 + 3 * attempt, box["y"] + box["height"] * 0.6
            found.page.mouse.move(x, y)
            found.page.wait_for_timeout(1000)
            found.page.mouse.click(x, y)
            if found.page.evaluate("location.hash.includes('op=')"):
                break
        found.until("location.hash.includes('op=')")
        assert "forward" in found.text("#moment-where")


def test_dragging_zooms_and_the_whole_step_comes_back(files: Path, browser: Any) -> None:
    with opened(browser, html(files, "gpt.profile.json.gz")) as found:
        found.page.locator("#area").scroll_into_view_if_needed()
        box = found.page.locator("#area .nsewdrag").first.bounding_box()
        y = box["y"] + box["height"] / 2
        found.page.mouse.move(box["x"] + box["width"] * 0.3, y)
        found.page.mouse.down()
        found.page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=6)
        found.page.mouse.up()
        found.until("location.hash.includes('from=')")
        shown = found.page.evaluate("document.getElementById('strip').layout.xaxis.range")
        assert shown[0] > 0
        found.page.keyboard.press("0")
        found.until("!location.hash.includes('from=')")


def test_the_table_searches_sorts_and_filters(files: Path, browser: Any) -> None:
    with opened(browser, html(files, "gpt.profile.json.gz")) as found:
        page = found.page
        page.keyboard.press("/")
        page.keyboard.type("mlp gelu")
        names = page.locator("#rows td.name").all_inner_texts()
        assert names
        assert all("mlp" in name and "gelu" in name for name in names)
        page.fill("#search", "")
        page.click("#heads th:has-text('Bytes') button")
        assert page.get_attribute("#heads th:has-text('Bytes')", "aria-sort") == "ascending"
        page.click("#heads th:has-text('Tensor') button")
        names = page.locator("#rows td.name button").all_inner_texts()
        assert names == sorted(names, key=str.lower) or len(set(names)) > 1
        page.click("#chips button:has-text('activation')")
        assert "activation" not in page.locator("#rows").inner_text()
        assert page.get_attribute("#chips button:has-text('activation')", "aria-pressed") == "false"
        page.fill("#search", "no tensor is called this")
        assert found.text("#table-note") == "No tensor matches."


def test_a_row_and_its_bar_find_each_other(files: Path, browser: Any) -> None:
    with opened(browser, html(files, "gpt.plan.json")) as found:
        page = found.page
        shapes = "document.getElementById('strip').layout.shapes.length"
        assert page.evaluate(shapes) == 1
        page.locator("#rows td.name button").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("#rows tr.on").count() == 1
        assert "Born at op" in found.text("#rows tr.detail")
        assert page.evaluate(shapes) == 2
        page.evaluate(
            "const p = document.getElementById('strip'); p.emit('plotly_click', {points: [{customdata: p.data[0].customdata[0]}]})"
        )
        assert page.locator("#rows tr.on").count() == 1
        page.keyboard.press("Escape")
        assert page.locator("#rows tr.on").count() == 0


def test_with_the_plan_the_picture_reaches_the_predicted_peak(files: Path, browser: Any) -> None:
    plan = load_plan(files / "gpt.plan.json")
    with opened(browser, html(files, "gpt.plan.json")) as found:
        found.page.click("[data-set='view=plan']")
        found.page.click("[data-do=peak]")
        assert found.text("#moment-what b") == format_bytes(plan.predicted_peak_bytes)
        top = found.page.evaluate(
            "(() => { const d = document.getElementById('area').data.filter((t) => t.stackgroup);"
            " return Math.max(...d[0].x.map((_, i) => d.reduce((s, t) => s + t.y[i], 0))); })()"
        )
        assert top == plan.predicted_peak_bytes
        kinds = {action.kind for action in plan.actions}
        hatches = found.page.locator("#strip-card .hatch")
        assert {each.get_attribute("class") for each in hatches.all()} == {f"hatch {kind}" for kind in kinds}
        drawn = set(found.page.evaluate("document.getElementById('strip').data.map((t) => t.name)"))
        assert kinds & drawn


def test_the_address_brings_the_same_picture_back(files: Path, browser: Any) -> None:
    path = html(files, "gpt.plan.json")
    with opened(browser, path) as found:
        found.page.click("[data-set='view=plan']")
        found.page.click("[data-set='x=op']")
        found.page.focus("#moment-slider")
        found.page.keyboard.press("PageDown")
        found.page.fill("#search", "mlp")
        fragment = found.page.evaluate("location.hash")
        seen = [found.text(each) for each in ("#moment-what", "#table-note", "#strip-note", "#rows")]
    with opened(browser, path, fragment) as found:
        assert [found.text(each) for each in ("#moment-what", "#table-note", "#strip-note", "#rows")] == seen
        assert found.page.get_attribute("[data-set='view=plan']", "aria-pressed") == "true"


def test_light_and_dark_change_by_a_button_and_follow_the_system(files: Path, browser: Any) -> None:
    path = html(files, "gan.profile.json.gz")
    colour = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, path, color_scheme="dark") as found:
        dark = found.page.evaluate(colour)
        found.page.click("#theme")
        light = found.page.evaluate(colour)
        assert dark != light
        assert found.text("#theme") == "Dark"


def test_what_is_seen_can_be_taken_along(files: Path, browser: Any, tmp_path: Path) -> None:
    trace = load_trace(files / "gpt.profile.json.gz")
    with opened(browser, html(files, "gpt.profile.json.gz")) as found:
        for form in ("csv", "json"):
            with found.page.expect_download() as download:
                found.page.click(f"[data-do={form}]")
            download.value.save_as(tmp_path / form)
        with found.page.expect_download() as download:
            found.page.click("[data-do=png]")
        download.value.save_as(tmp_path / "png")
    assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "json").read_text())
    assert sum(row["bytes"] for row in rows) == peak_of(trace).named_bytes
    assert len((tmp_path / "csv").read_text().splitlines()) == len(rows) + 1


def test_two_profiles_lie_on_one_scale(files: Path, browser: Any) -> None:
    with opened(browser, html(files, "gan.profile.json.gz", "gpt.profile.json.gz")) as found:
        assert "gpt peaks at" in found.text("h1").replace("\u00a0", " ")
        assert "activation" in found.text("#delta")
        found.page.click("[data-set='run=1']")
        trace = load_trace(files / "gpt.profile.json.gz")
        assert f"of {trace.op_count}" in found.text(".moment")


def test_a_snapshot_of_torchs_is_shown_too(tmp_path: Path, browser: Any) -> None:
    path = snapshot_of(tmp_path, "medium_512_inference")
    inputs = read_inputs([path])
    target = tmp_path / "snapshot.html"
    target.write_text(page_of(inputs, [path.name]))
    with opened(browser, target) as found:
        assert (
            found.text("h1").replace("\u00a0", " ")
            == f"The snapshot peaks with {format_bytes(inputs.runs[0].trace.peak_bytes)} on the device"
        )
        assert found.page.locator("#rows tr.row").count() == 20


def test_the_map_of_the_allocator_tells_what_lies_where(tmp_path: Path, browser: Any) -> None:
    path = snapshot_of(tmp_path, "medium_512_training")
    target = tmp_path / "snapshot.html"
    target.write_text(page_of(read_inputs([path]), [path.name]))
    with opened(browser, target) as found:
        assert "free" in found.text("#allocator-card .sub")
        found.page.locator("#allocator").scroll_into_view_if_needed()
        drawn = found.page.evaluate(
            "document.getElementById('allocator').data.map((t) => [t.name, (t.x || []).length])"
        )
        assert {name for name, count in drawn if count} >= {"free", "rounding", "segment"}
        box = found.page.locator("#allocator .nsewdrag").first.bounding_box()
        found.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.97)
        found.until("document.querySelector('#allocator .hoverlayer')?.textContent.includes('segment')")


def test_the_lines_that_fill_the_device_stand_at_the_top(files: Path, browser: Any) -> None:
    trace = load_trace(files / "gpt.profile.json.gz")
    place, size = next(iter(peak_of(trace).by_line.items()))
    with opened(browser, html(files, "gpt.profile.json.gz")) as found:
        first = found.page.locator(".lines li").first.inner_text()
        assert place in first
        assert format_bytes(size) in first
        code = (ROOT / "examples" / "char_gpt.py").read_text().splitlines()[int(place.rpartition(":")[2]) - 1]
        assert code.strip()[:60] in first
    with opened(browser, html(files, "gpt.profile.json.gz", with_source=False)) as found:
        assert found.page.locator(".lines li").count() == 0


def test_a_plan_lies_among_all_that_could_have_been(files: Path, browser: Any) -> None:
    plan = load_plan(files / "gpt.plan.json")
    curve = {"schema": "memopt.pareto/1", "kind": "pareto", "unplanned_peak_bytes": plan.unplanned_peak_bytes,
             "points": [{"budget_bytes": 10**8, "feasible": True, "predicted_peak_bytes": 10**8, "overhead": 0.01}]}  # fmt: skip
    (files / "curve.json").write_text(json.dumps(curve))
    with opened(browser, html(files, "gpt.plan.json", "gpt.outcome.json", "curve.json")) as found:
        names = found.page.evaluate("document.getElementById('pareto').data.map((t) => t.name)")
        assert set(names) == {"plan for a budget", "as it is", "chosen", "measured"}


def test_a_moment_without_ops_is_a_table(tmp_path: Path, browser: Any) -> None:
    trace = trace_of_now(
        Script(argv=["train.py"], cwd="/"), "the script ran out of memory: so it said", "train.py:7"
    )
    with opened(browser, made(tmp_path, trace)) as found:
        assert found.text("h1").startswith("Out of memory, with ")
        assert not found.page.is_visible("#area")
        assert found.text("#moment-what").endswith("when it ended")
        assert found.text("#tensors-title").endswith("when it ended")
        assert "op 0" not in found.text("main")
        assert found.page.locator(".kpis dt").all_inner_texts() == ["On the device", "Found", "Device"]


def test_hostile_names_stay_text(tmp_path: Path, browser: Any) -> None:
    evil = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    trace = toy_trace()
    strings = [
        text if not text or text.startswith("aten") else f"{evil} \u202e{text}" for text in trace.strings
    ]
    script = msgspec.structs.replace(trace.script, argv=[evil, "'\">"], cwd=evil)
    hostile = msgspec.structs.replace(trace, strings=strings, script=script, notes=[evil], partial="")
    with opened(browser, made(tmp_path, hostile)) as found:
        found.page.hover("#strip .nsewdrag")
        assert found.page.title() != "owned"
        assert found.page.locator("img").count() == 0
        assert "\u202e" not in found.page.content()
        assert found.page.locator("#rows td.name").count() == 6
        assert "</script>" in found.page.locator("#rows td.name").first.inner_text()


def test_the_longest_name_is_cut(tmp_path: Path, browser: Any) -> None:
    trace = toy_trace()
    strings = [text.replace("Net.fc", "N" * 2_000_000) for text in trace.strings]
    path = made(tmp_path, msgspec.structs.replace(trace, strings=strings))
    assert path.stat().st_size < 6_000_000, "where 10 MB would do"
    with opened(browser, path) as found:
        assert re.search("NNN(…| … )", found.text("#rows"))


@pytest.mark.parametrize("wide", [1280, 390])
def test_a_very_deep_path_breaks_into_lines(tmp_path: Path, browser: Any, wide: int) -> None:
    trace, deep = toy_trace(), ".".join(f"m{number}" for number in range(500))
    strings = [text.replace("Net.fc", deep) for text in trace.strings]
    path = made(tmp_path, msgspec.structs.replace(trace, strings=strings))
    with opened(browser, path, viewport={"width": wide, "height": 844}) as found:
        assert found.page.evaluate("document.documentElement.scrollWidth") == wide
        left, right = found.page.evaluate(
            "(() => { const all = [...document.querySelectorAll('#modules .slice')].map((s) => s.getBoundingClientRect());"
            " return [Math.min(...all.map((s) => s.left)), innerWidth - Math.max(...all.map((s) => s.right))]; })()"
        )
        assert abs(left - right) < 20, "the picture of the modules takes the whole width"


def test_twenty_thousand_ops_open_at_once(tmp_path: Path, browser: Any) -> None:
    """Within 3 s where a small page takes one: asserted as a ratio, since machines differ."""
    small = made(tmp_path, toy_trace())
    trace = large_trace(10_000)
    assert trace.op_count == 20_000
    large = made(tmp_path, trace, "large.profile.json.gz")
    assert large.stat().st_size < 10_000_000
    times = {}
    for path in (small, large, small, large):
        begin = time.monotonic()
        with opened(browser, path) as found:
            times[path] = min(times.get(path, 1e9), time.monotonic() - begin)
            assert found.page.locator("#rows tr.row").count() > 0
    assert times[large] < 2.5 * times[small] + 0.5


def test_no_peak_is_lost_in_thinning(tmp_path: Path, browser: Any) -> None:
    trace = large_trace(4000)
    trace.ops.extra_bytes[5432] = 1 << 40
    trace = msgspec.structs.replace(trace, peak_bytes=trace.ops.live_bytes[5432] + (1 << 40))
    with opened(browser, made(tmp_path, trace)) as found:
        top = found.page.evaluate(
            "(() => { const d = document.getElementById('area').data.filter((t) => t.stackgroup);"
            " return Math.max(...d[0].x.map((_, i) => d.reduce((s, t) => s + t.y[i], 0))); })()"
        )
        assert top == trace.peak_bytes


def test_print_is_light_and_shows_the_pictures(files: Path, browser: Any, tmp_path: Path) -> None:
    with opened(browser, html(files, "gpt.plan.json"), color_scheme="dark") as found:
        data = found.page.pdf(format="A4", print_background=False)
        assert data.startswith(b"%PDF")
        assert found.page.evaluate("document.documentElement.dataset.theme") == "dark"
        found.page.emulate_media(media="print")
        assert found.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not found.page.is_visible("#moment-slider")


def test_the_policy_lets_no_other_script_run(files: Path, browser: Any) -> None:
    path = html(files, "gan.profile.json.gz")
    text = path.read_text()
    evil = path.with_name("evil.html")
    evil.write_text(
        text.replace(
            "</main>", "<script>document.title = 'owned'</script><img src='https://example.com/x'></main>"
        )
    )
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto(evil.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.title() != "owned"
    context.close()


def test_the_same_input_gives_the_same_page(files: Path) -> None:
    names = ["gpt.plan.json", "gpt.outcome.json"]
    paths = [files / name for name in names]
    assert page_of(read_inputs(paths), names) == page_of(read_inputs(paths), names)


def test_a_plan_for_another_profile_is_shown_alone(files: Path) -> None:
    inputs = read_inputs([files / "gan.profile.json.gz", files / "gpt.plan.json"])
    assert inputs.runs[0].planned is None
    assert inputs.notes[0].startswith("gpt.plan.json is shown without its profile")
    plan, other = load_plan(files / "gpt.plan.json"), load_trace(files / "gan.profile.json.gz")
    with pytest.raises(MemoptError, match="not made from this profile"):
        read_plan(plan, other)


def test_a_plan_is_read_back_to_the_very_timeline_that_was_promised(files: Path) -> None:
    plan = load_plan(files / "gpt.plan.json")
    read = read_plan(plan, load_trace(files / "gpt.profile.json.gz"))
    assert (read.timeline.peak_bytes, read.timeline.step_ms) == (
        plan.predicted_peak_bytes,
        plan.predicted_step_ms,
    )
    assert {each.storage for each in read.away} <= {action.storage for action in plan.actions}
