"""docs/torch-internals.md, made from the doors' own lists: `make docs` writes it, a test compares it."""

from __future__ import annotations

from pathlib import Path

from memopt.estimators.fake import torch_internals as fake_internals
from memopt.instrument import torch_internals
from memopt.instrument.torch_internals import Name

PAGE = Path(__file__).parents[2] / "docs" / "torch-internals.md"

HEAD = """# torch's private parts

memopt stands inside PyTorch's dispatcher, autograd engine and allocator, and much of what it needs there has no public name. All such
names are in two files, `instrument/torch_internals.py` and `estimators/fake/torch_internals.py`, and in no other; a test keeps it so.

A new release of torch may lose a name. Then the features below that need it are off, memopt says which and why, and the script runs as
it does under `python`. `memopt doctor` tells it beforehand. What was tried with which release of torch is in [status.md](status.md).
"""


def page() -> str:
    """The page as it should be."""
    names = [*torch_internals.NAMES, *fake_internals.NAMES]
    parts = [HEAD]
    for feature in dict.fromkeys(name.feature for name in names):
        rows = [_row(name) for name in names if name.feature == feature]
        parts.append(
            f"\n## {feature[0].upper()}{feature[1:]}\n\n| name | what for |\n| --- | --- |\n" + "".join(rows)
        )
    return "".join(parts)


def _row(name: Name) -> str:
    return f"| `{name.spelling}` | {name.purpose} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
