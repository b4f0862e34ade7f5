"""Whether a script may want a gradient after the step, told before it does: the words in its files, and the paths of its code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memopt.instrument.stepping import source_mentions_gradients as gradient_words
from memopt.instrument.stepping.cleared import is_cleared
from memopt.instrument.stepping.source_mentions_gradients import speaks_of_gradients

Body = Callable[[Callable[[], None], torch.optim.Optimizer, torch.nn.Module, int], object]


def first(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    for _ in range(n):
        optimizer.zero_grad()
        back()
        optimizer.step()


def first_with_arguments(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    while n:
        model.zero_grad(set_to_none=True)
        back()
        optimizer.step()
        n -= 1


def last(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    for step in range(n):
        back()
        optimizer.step()
        if step % 2:
            print(end="")
        optimizer.zero_grad()


def on_either_way(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    for step in range(n):
        if step % 2:
            optimizer.zero_grad()
        else:
            model.zero_grad()
        with torch.enable_grad():
            back()
            optimizer.step()


def sometimes(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    for step in range(n):
        back()
        optimizer.step()
        if step % 2 or step < 7:
            optimizer.zero_grad()


def skipped(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    for step in range(n):
        back()
        optimizer.step()
        if step > 100:
            continue
        optimizer.zero_grad()


def once(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    optimizer.zero_grad()
    for _ in range(n):
        back()
        optimizer.step()


def left_behind(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    back()
    optimizer.step()
    if n > 100:
        return
    optimizer.zero_grad()


def caught(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    for step in range(n):
        try:
            back()
            optimizer.step()
            print(end="", file=None if step < 100 else 1)
            optimizer.zero_grad()
        except ValueError:
            print(end="")


def of_another(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    other = torch.optim.SGD([torch.ones(1)], lr=0.1)
    for _ in range(n):
        other.zero_grad()
        back()
        optimizer.step()


def of_a_part(back, optimizer, model, n):  # type: ignore[no-untyped-def]
    part = model[0]
    for _ in range(n):
        part.zero_grad()
        back()
        optimizer.step()


@pytest.mark.parametrize(
    ("body", "sure"),
    [
        *((body, True) for body in (first, first_with_arguments, last, on_either_way)),
        *((body, False) for body in (sometimes, skipped, once, left_behind, caught, of_another, of_a_part)),
    ],
)
def test_cleared_whatever_happens(body: Body, sure: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []

    def back() -> None:
        found.append(is_cleared(sys._getframe(1), optimizer))

    body(back, optimizer, model, 2)
    assert set(found) == {sure}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Write module `name` with `source` where only the test's own modules are looked at; import it unless told otherwise."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gradient_words, "_is_own", lambda name: name.startswith(str(tmp_path)))
    monkeypatch.setattr(gradient_words, "_read", {})
    monkeypatch.setattr(gradient_words, "_last", (0, ""))
    before = set(sys.modules)

    def write(name: str, source: str, *, load: bool = True) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        if load:
            __import__(name)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("lambda p: p.grad.norm()", "grad"),
        ("lambda p: getattr(p, 'grad')", "grad"),
        ("lambda nn, m: nn.utils.clip_grad_norm_(m.parameters(), 1.0)", "clip_grad_norm_"),
        ("print({'train/grad_norm': 0}, end='')", "train/grad_norm"),
        ("def log_gradients(): ...", "log_gradients"),
        ("class GradScaler: ...", "GradScaler"),
        ("dict(gradient_accumulation_steps=1)", "gradient_accumulation_steps"),
        ("lambda torch, x, y: torch.autograd.grad(x, y)", ""),
        ("def backward(ctx, grad, *grad_rest): return 2 * grad", ""),
        ("def norm(grad): return grad.grad", "grad"),
        ("lambda p, norm, name='grad': norm(getattr(p, name))", "grad"),
        ("lambda torch, o, p: (torch.no_grad(), o.zero_grad(), p.requires_grad_(False), torch.optim.Adagrad)", ""),
        ("'''Follows the gradient. p.grad is never looked at.'''", ""),
        ("lambda m: m.gradient_checkpointing_enable()  # p.grad", ""),
        ("upgrade = degraded = 'a grade'", ""),
    ],
)  # fmt: skip
def test_words_of_gradients(own: Callable[..., None], line: str, word: str) -> None:
    own("wanted_one", f"import math\n{line}\n")
    assert speaks_of_gradients() == (f"wanted_one.py:2 ({word})" if word else "")


def test_modules_that_are_imported_later_are_read_too(own: Callable[..., None]) -> None:
    own("wanted_log", "import wanted_deep", load=False)
    own("wanted_deep", "def norm(p): return p.grad.norm()", load=False)
    own("wanted_main", "def every_tenth():\n    import wanted_log\n")
    assert speaks_of_gradients() == "wanted_deep.py:1 (grad)"
    assert "wanted_log" not in sys.modules


def test_a_module_that_comes_later_is_read_when_it_is_there(own: Callable[..., None]) -> None:
    own("wanted_first", "x = 1")
    assert speaks_of_gradients() == ""
    own("wanted_then", "x = lambda p: p.grad")
    assert speaks_of_gradients() == "wanted_then.py:1 (grad)"
