"""`python -m tools.house`: the rules of the house, read off the source; says what breaks one, and ends with 1. `--tree`: the folders.

1. No module imports itself by way of others; imports for type checking and inside functions count like all.
2. Arrows between rooms go one way: a room imports only rooms below it (`ROOMS`).
3. Folders beside each other in a room import each other one way only. `BOTH_WAYS` names those that do not yet: it may shrink.
4. No folder of the package or of the tests has more than `MOST` modules.

import-linter, which does the like, wants a package whose folders lie inside it; here the rooms are `memopt/`'s siblings.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 20

ROOMS = ("memopt", "instrument", "profiler", "estimators", "advisors", "enforcers", "reports", "cli", "door")
"""From the bottom up. `profiler` and the rooms above it that it does not know may stand in any order that holds."""

DOOR = {"memopt", "memopt.__main__", "memopt.api", "memopt.notebook", "memopt.integrations"}
"""What a user imports: it may use every room, and no room uses it."""

BOTH_WAYS = {
    ("estimators/elsewhere", "estimators/hidden"),
    ("estimators/fake/gpu", "estimators/fake/script"),
    ("estimators/fake/kernels", "estimators/fake/values"),
}

Imports = dict[str, set[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {}
    for room in ROOMS[:-1]:
        for path in sorted((root / room).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts if room == "memopt" else ("memopt", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(files: Mapping[str, Path]) -> Imports:
    """Who imports whom, wherever the statement stands."""
    return {name: set(_imported(path, files)) - {name} for name, path in files.items()}


def _imported(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (name for name in (whole if whole in files else node.module,) if name in files)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)


def circles(graph: Imports) -> list[list[str]]:
    """Modules that import each other, by way of others or at once: the strongly connected parts (Tarjan 1972)."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            part = stack[stack.index(name) :]
            del stack[-len(part) :]
            if len(part) > 1:
                found.append(sorted(part))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def room_of(name: str) -> str:
    """The room of a module: its top folder, or the door."""
    if name in DOOR or name.startswith("memopt.integrations."):
        return "door"
    second = name.split(".")[1]
    return second if second in ROOMS else "memopt"


def wrong_arrows(graph: Imports) -> list[str]:
    """Imports of a room from one above it."""
    height = {room: number for number, room in enumerate(ROOMS)}
    return [
        f"{name} imports {other}: {room_of(name)} lies below {room_of(other)}"
        for name, others in graph.items()
        for other in sorted(others)
        if height[room_of(name)] < height[room_of(other)]
    ]


def both_ways(graph: Imports, files: Mapping[str, Path], root: Path = ROOT) -> set[tuple[str, str]]:
    """Pairs of folders with the same parent whose modules import each other's."""
    arrows = set()
    for name, others in graph.items():
        for other in others:
            one, two = (files[each].relative_to(root).parent.parts for each in (name, other))
            same = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
            if same:
                arrows.add(("/".join(one[: same + 1]), "/".join(two[: same + 1])))
    return {(one, two) for one, two in arrows if one < two and (two, one) in arrows}


def full_folders(root: Path = ROOT) -> list[str]:
    """Folders of more than `MOST` modules; `__init__.py` is none."""
    count = Counter(
        path.parent
        for room in (*ROOMS[:-1], "tests")
        for path in (root / room).rglob("*.py")
        if path.name != "__init__.py"
    )
    return [
        f"{folder.relative_to(root)} has {number} modules, more than {MOST}"
        for folder, number in sorted(count.items())
        if number > MOST
    ]


def faults(root: Path = ROOT) -> list[str]:
    """What breaks a rule, a line each."""
    files = modules(root)
    graph = imports(files)
    pairs = both_ways(graph, files, root)
    return [
        *(f"a circle: {', '.join(part)}" for part in circles(graph)),
        *wrong_arrows(graph),
        *(f"{one} and {two} import each other" for one, two in sorted(pairs - BOTH_WAYS)),
        *(
            f"{one} and {two} no longer import each other: take them out of BOTH_WAYS"
            for one, two in sorted(BOTH_WAYS - pairs)
        ),
        *full_folders(root),
    ]


def tree(root: Path = ROOT) -> str:
    """The folders of the package with their captions (the first line of each `__init__.py`'s docstring), as a table in Markdown."""
    rows = ["| folder | what is there |", "|---|---|"]
    for room in ROOMS[:-1]:
        for path in sorted((root / room).rglob("__init__.py")):
            caption = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
            rows.append(f"| `{path.parent.relative_to(root)}/` | {caption.replace('|', ' ')} |")
    return "\n".join(rows)


def main() -> int:
    """Print the faults, or with `--tree` the folders; the exit code."""
    sys.setrecursionlimit(10_000)
    if "--tree" in sys.argv[1:]:
        print(tree())
        return 0
    found = faults()
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
