"""On a GPU hooks of backward run in a thread of the device's, which Python did not start: a step there is announced too."""

from __future__ import annotations

import _thread
import threading

import torch

from memopt.instrument import iterations as stepping
from memopt.instrument.iterations import Iterations


class Heard:
    def __init__(self):
        self.words = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.words.append(name)


class StepsElsewhere(torch.autograd.Function):
    """Its backward steps the optimizer in a thread that `threading` knows nothing of, as the engine's own are."""

    @staticmethod
    def forward(ctx, x, start):
        ctx.start = start
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.start()
        return gradient, None


def _heard(start, monkeypatch, *, task):
    heard = Heard()
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    iterations = Iterations(heard)
    iterations.install()
    monkeypatch.setattr(stepping, "current_graph_task", lambda: task)

    def step():
        done = threading.Event()

        def work():
            parameter.grad = torch.ones(2)
            optimizer.step()
            done.set()

        start(work)
        assert done.wait(20)

    try:
        StepsElsewhere.apply(parameter * 2, step).sum().backward()
    finally:
        iterations.remove()
    return heard.words


def test_a_step_in_the_engines_thread_is_announced(monkeypatch):
    words = _heard(lambda work: _thread.start_new_thread(work, ()), monkeypatch, task=3)
    assert words[:4] == ["backward_begins", "step_begins", "step_ended", "backward_ended"]
    assert "thread_changed" not in words


def test_one_in_a_thread_of_the_scripts_is_not(monkeypatch):
    words = _heard(lambda work: threading.Thread(target=work).start(), monkeypatch, task=3)
    assert "step_begins" not in words


def test_one_outside_of_autograd_is_not(monkeypatch):
    words = _heard(lambda work: _thread.start_new_thread(work, ()), monkeypatch, task=-1)
    assert "step_begins" not in words
