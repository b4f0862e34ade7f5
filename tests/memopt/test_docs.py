"""The documents name what the code has: every field of every form, every command, every make target they mention."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from memopt import outcome, plan, trace
from memopt.cli.table import COMMANDS
from memopt.device import Device

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


@pytest.mark.parametrize("name", ["README.md", "docs/formats.md", "docs/status.md"])
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)#:\s]+)[^):]*\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
