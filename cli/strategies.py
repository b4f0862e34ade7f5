"""`memopt strategies`: who can plan, from which paper, what each needs and may do."""

from __future__ import annotations

from typing import Any

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write the list as JSON.")
def strategies(as_json: bool) -> None:
    """List the planning strategies."""
    rows = listing()
    if as_json:
        from memopt.reports.summary import encode

        click.echo(encode({"strategies": rows}))
        return
    from rich.console import Group
    from rich.text import Text

    from memopt.cli.console import out
    from memopt.reports.tables import plain_table

    columns = [
        ("name", "left"),
        ("plans", "left"),
        ("may choose", "left"),
        ("paper, and what it needs", "name"),
    ]
    table = plain_table("Strategies", columns)
    for row in rows:
        allows = ", ".join(row["allows"])
        table.add_row(
            row["name"], row["plans"], allows, Group(Text(row["paper"]), Text(row["needs"], style="dim"))
        )
    out().print(table)


def listing() -> list[dict[str, Any]]:
    """One entry a strategy: those on profiles, then those on plain graphs."""
    from memopt.advisors.registry import STRATEGIES

    rows: list[dict[str, Any]] = [
        {
            "name": each.name,
            "plans": "profiles",
            "paper": each.paper,
            "needs": each.needs,
            "allows": sorted(each.allows),
        }
        for each in STRATEGIES.values()
    ]
    return rows + _graph_rows()


def _graph_rows() -> list[dict[str, Any]]:
    from memopt.advisors.graph_plan import GRAPH_STRATEGIES

    rows = []
    for name, strategy in GRAPH_STRATEGIES.items():
        words = (strategy.__doc__ or "").strip().split("\n")[0].rstrip(".")
        rows.append(
            {
                "name": name,
                "plans": "graphs",
                "paper": words,
                "needs": "--graph",
                "allows": ["recompute", "swap"],
            }
        )
    return rows
