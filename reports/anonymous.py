"""`--no-source`: what a trace's names tell of the script's files is taken out before anything is made of it."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec

from memopt.reports.inputs import Inputs
from memopt.reports.page.allocator_view import AllocatorView
from memopt.trace import Trace

_FILE = re.compile(r"[^\s·]*\.(?:py|pyx|ipynb)\b[^\s·]*")


def without_files(inputs: Inputs) -> Inputs:
    """`inputs` whose traces name no line, no file and no function of the script; the labels of a snapshot are made of these."""
    runs = [replace(run, trace=_without(run.trace), layout=_of_layout(run.layout)) for run in inputs.runs]
    return replace(inputs, runs=runs)


def _without(trace: Trace) -> Trace:
    lines = {*trace.ops.line, *trace.storages.line}
    strings = ["" if place in lines else hidden(text) for place, text in enumerate(trace.strings)]
    return msgspec.structs.replace(trace, strings=strings, notes=[hidden(note) for note in trace.notes])


def hidden(text: str) -> str:
    """`the script · aten.mm` of `train.py:step · aten.mm`."""
    return _FILE.sub("the script", text)


def _of_layout(layout: AllocatorView | None) -> AllocatorView | None:
    if layout is None:
        return None
    segments = tuple(
        replace(each, pieces=tuple(replace(piece, label=hidden(piece.label)) for piece in each.pieces))
        for each in layout.segments
    )
    return replace(layout, segments=segments)
