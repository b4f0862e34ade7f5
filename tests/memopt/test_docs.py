"""The documents name what the code has: every field of every form, every command, every make target they mention."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from memopt import outcome, plan, trace
from memopt.cli.strategies import listing
from memopt.cli.table import COMMANDS
from memopt.device import Device
from memopt.reports.formats.perfetto import MOST_SPANS
from memopt.reports.page.data import MOST_TENSORS

ROOT = Path(__file__).parents[2]
FORMATS = (ROOT / "docs" / "formats.md").read_text()
README = (ROOT / "README.md").read_text()

FORMS: tuple[type[msgspec.Struct], ...] = (
    Device, trace.Script, trace.Trace, trace.Ops, trace.Values, trace.Storages, trace.Slots,
    plan.Plan, plan.Action, plan.ScriptAction, plan.SlotRef, plan.OpRef, outcome.Outcome, outcome.ActionCounts,
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_field_is_documented(form: type[msgspec.Struct]) -> None:
    words = set(re.findall(r"[a-z0-9_]+", FORMATS))
    assert [name for name in form.__struct_fields__ if name not in words] == []


@pytest.mark.parametrize("schema", [trace.SCHEMA, plan.SCHEMA, outcome.SCHEMA])
def test_every_schema_is_documented(schema: str) -> None:
    assert f"`{schema}`" in FORMATS


def test_categories_and_phases_are_documented_by_number() -> None:
    for names in (trace.CATEGORIES, trace.PHASES):
        assert ", ".join(f"{number} {name}" for number, name in enumerate(names)) in FORMATS


def test_readme_shows_every_command_and_no_other() -> None:
    shown = set(re.findall(r"(?:^    |`|-m )memopt ([a-z]+)", README, re.MULTILINE))
    assert shown == set(COMMANDS)


@pytest.mark.parametrize("name", ["README.md", "docs/formats.md", "docs/status.md", "docs/evidence.md"])
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)#:\s]+)[^):]*\)", path.read_text()):
        assert (path.parent / target).exists(), target


def rows_of(text: str) -> list[tuple[list[str], list[str]]]:
    """(names, other cells) of each row of the tables in `text`."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([a-z0-9+-]+)`", row[0]), [cell.strip(" |") for cell in row[1:]]) for row in rows]


def test_every_strategy_is_described_and_no_other() -> None:
    """docs/strategies.md against what the commands would plan with: names, and the papers of those for profiles."""
    profiles, graphs = (ROOT / "docs" / "strategies.md").read_text().split("## On a plain graph")
    for text, kind in ((profiles, "profiles"), (graphs, "graphs")):
        registered = {row["name"]: row for row in listing() if row["plans"] == kind}
        described = [name for names, _ in rows_of(text) for name in names]
        assert sorted(described) == sorted(registered)
        for names, cells in rows_of(text):
            assert all(len(cell) > 10 for cell in cells[1:]), names
            for name in names if kind == "profiles" else []:
                paper = registered[name]["paper"]
                authors = re.findall(r"([A-Z][a-z]+)(?: et al\.| and [A-Z][a-z]+)? (\d{4})", paper)
                assert all(author in cells[0] and year in cells[0] for author, year in authors), (name, paper)


def test_the_limits_are_those_of_the_code() -> None:
    text = " ".join((ROOT / "docs" / "limits.md").read_text().split())
    bars = re.search(r"MOST_BARS = (\d+)", (ROOT / "reports" / "templates" / "strip.js").read_text())
    assert bars is not None
    for words, number in (
        ("lists the {} largest tensors", MOST_TENSORS),
        ("draws at most {} bars", int(bars[1])),
        ("draws the {} largest tensors", MOST_SPANS),
    ):
        assert words.format(f"{number:,}") in text


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
