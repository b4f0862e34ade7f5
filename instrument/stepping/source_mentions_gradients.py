"""Does the script's own code speak of gradients? It may look at them in other iterations than the one that was watched.

Every file of the script's own that is loaded, or imported somewhere in one that is, is read: no name in it, and no string that
could be a name, may be of gradients. Libraries are asked for gradients by such names too: `clip_grad_norm_`, `"grad_norm"`.
What a function calls its arguments is its own affair (`def backward(ctx, grad)`): whoever passes one has named it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

_GRADIENT = re.compile(r"(?:(?<![A-Za-z])|(?<=[a-z])(?=G))[gG]rad(?:s|ient|ients)?(?![a-z])")
_HARMLESS = re.compile(
    r"no_grad|zero_grad|requires_grad_?|enable_grad|set_grad_enabled|is_grad_enabled|grad_fn"
    r"|\w*gradient_checkpointing\w*|\w*[gG]radientCheckpointing\w*"
)
_NAME = re.compile(r"[\w./:-]+")
_LIBRARIES = tuple(
    f"{folder}/"
    for folder in (
        Path(torch.__file__).parent.parent,
        Path(re.__file__).parent.parent,
        Path(__file__).parent.parent,
    )
)
_read: dict[str, str] = {}
"""File -> the first word of gradients in it, or nothing."""
_last = 0, ""
"""How many modules were loaded, and what was found in them."""


def speaks_of_gradients() -> str:
    """`train.py:41 (grad_norm)`: where the script's own code first does; empty where it does nowhere."""
    global _last
    if _last[0] != len(sys.modules):
        _last = len(sys.modules), _first_word()
    return _last[1]


def _first_word() -> str:
    for module in list(sys.modules.values()):
        told = _written_in(module)
        name, package = told.get("__file__"), told.get("__package__")
        if (
            isinstance(name, str)
            and _is_own(name)
            and str(told.get("__name__")).partition(".")[0] != "memopt"
        ):
            found = _word_in(name, package if isinstance(package, str) else "")
            if found:
                return found
    return ""


def _written_in(module: object) -> dict[str, object]:
    """What a module holds, without asking it: one that loads itself when it is asked would, and may fail."""
    return object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else {}


def _is_own(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(_LIBRARIES) and "site-packages" not in name


def _word_in(name: str, package: str) -> str:
    """The first word of gradients in file `name`, or in one of the script's own that it imports."""
    if name not in _read:
        _read[name] = ""  # files may import each other
        try:
            tree = ast.parse(Path(name).read_bytes())
        except (OSError, SyntaxError, ValueError):
            return ""
        _read[name] = _word_of(tree, Path(name).name) or _word_later(tree, package)
    return _read[name]


def _word_of(tree: ast.Module, file: str) -> str:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "grad" and id(node) in called:
            continue  # autograd.grad(...): gives what it computes, and leaves none behind
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and node.id in arguments):
            continue
        for word in _words(node):
            if _GRADIENT.search(word) and not _HARMLESS.fullmatch(word):
                return f"{file}:{getattr(node, 'lineno', 0)} ({word})"
    return ""


def _words(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "arg", "name", "asname"):
        word = getattr(node, field, None)
        if isinstance(word, str):
            yield from word.split(".")
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
        yield node.value


def _word_later(tree: ast.Module, package: str) -> str:
    """Of modules that `tree` imports and nobody has imported yet."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] + "." if node.level and package else ""
            base = (above + (node.module or "")).rstrip(".")
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            path = _file_of(name) if name and name not in sys.modules else None
            found = _word_in(str(path), name.rpartition(".")[0]) if path is not None else ""
            if found:
                return found
    return ""


def _file_of(name: str) -> Path | None:
    """The file of the script's own that module `name` would be loaded from; nothing is imported to find it."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not _is_own(spec.origin):
        return None
    whole = Path(spec.origin) if not rest else Path(spec.origin).parent.joinpath(*rest)
    candidates = (whole, whole.with_suffix(".py"), whole / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)
