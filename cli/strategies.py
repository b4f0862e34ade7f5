"""`memopt strategies`: who can plan, from which paper, what each needs and may do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from memopt.advisors.counsel.counsel import Counsel
    from memopt.advisors.registry import Strategy


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write the list as JSON.")
def strategies(as_json: bool) -> None:
    """List the planning strategies."""
    rows = listing()
    if as_json:
        from memopt.reports.formats.summary import encode

        click.echo(encode({"strategies": rows}))
        return
    from rich.console import Group
    from rich.text import Text

    from memopt.cli.shared.console import out
    from memopt.reports.tables import plain_table

    titles = {
        "profiles": "On profiles: memopt advise PROFILE --strategy NAME",
        "graphs": "On plain graphs: memopt advise --graph FILE --strategy NAME",
    }
    for kind, title in titles.items():
        table = plain_table(
            title, [("name", "left"), ("paper or rule, what it may choose, what it needs", "name")]
        )
        for row in rows:
            if row["plans"] == kind:
                table.add_row(row["name"], Group(Text(row["paper"]), Text(_terms(row), style="dim")))
        out().print(table)


def _terms(row: dict[str, Any]) -> str:
    """`recompute, swap; needs a link to the host or a disk`."""
    kinds = [kind for kind in row["allows"] if not kind.startswith("swap-")]
    kinds += ["swap"] * (len(kinds) < len(row["allows"]))
    text = ", ".join(kinds) or "plans nothing"
    if not row["enforced"]:
        text += " (advice only)"
    return text if row["plans"] == "graphs" else f"{text}; needs {row['needs']}"


def listing() -> list[dict[str, Any]]:
    """One entry a strategy: those that plan on profiles, those that advise, then those on plain graphs."""
    from memopt.advisors.registry import counsels, graph_strategies, profile_strategies

    rows = [_row(each, enforced=True) for each in profile_strategies().values()]
    rows += [_row(each, enforced=each.enforced) for each in counsels().values()]
    for name, strategy in graph_strategies().items():
        rows.append(
            {
                "name": name,
                "plans": "graphs",
                "paper": (strategy.on_graph.__doc__ or "").strip().split("\n")[0].rstrip("."),
                "needs": "--graph",
                "allows": sorted(strategy.graph_kinds),
                "enforced": True,
            }
        )
    return rows


def _row(strategy: Strategy | Counsel, *, enforced: bool) -> dict[str, Any]:
    return {
        "name": strategy.name,
        "plans": "profiles",
        "paper": strategy.paper,
        "needs": strategy.needs,
        "allows": sorted(strategy.allows),
        "enforced": enforced,
    }
