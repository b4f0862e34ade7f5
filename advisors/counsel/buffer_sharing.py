"""Buffer sharing: one arena with a fixed offset for every storage of the iteration, and what the allocator wastes beyond it.

Also called static memory planning. Layouts: greedy by size (Pisarchyk and Lee 2020, arXiv 2001.03288) and skyline best fit
(Sekiyama et al. 2018, arXiv 1804.10001), see `static_offsets`; the largest sum of live storages bounds them from below. Sharing
in place: see `in_place`. On CUDA the recorded sequence is run through the simulated caching allocator with PyTorch's default
settings and with others; what reserves least becomes a script action. O(n^2) for the offsets, replays for the rest.
Differs: PyTorch cannot be told offsets from outside, so the arena is a yardstick, not a plan; on a CPU, where malloc serves
each tensor by itself, nothing of it can be changed, and the peak stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.advisors.counsel.counsel import Advice
from memopt.advisors.counsel.in_place import in_place
from memopt.advisors.counsel.static_offsets import StaticOffsets, plan_offsets
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.registry import counsel
from memopt.estimators.allocator.replay import AllocatorEvents, replay
from memopt.estimators.allocator.settings import parse_settings
from memopt.estimators.elsewhere.recording import amounts_of, recording_of
from memopt.plan import ScriptAction
from memopt.trace import Trace
from memopt.units import format_bytes

_PASSES = 3
"""Iterations that are replayed: the allocator's segments settle after the first."""
SETTINGS = (
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "roundup_power2_divisions:8",
)
"""What is tried instead of the defaults, and of what the recorded run had."""
_WORTH = 0.01
"""No setting that saves less of what is reserved is advised."""


@counsel
class BufferSharing:
    name = "buffer-sharing"
    paper = "Pisarchyk and Lee 2020, Efficient Memory Management for Deep Neural Net Inference; Sekiyama et al. 2018, Profile-guided memory optimization for deep neural networks"
    needs = "a CUDA profile (or --device) for a setting that helps; otherwise it reports only"
    allows = frozenset({"allocator"})
    not_on_graphs = "it lays storages out in one address space, and a schedule has no addresses"
    enforced = True

    def study(self, problem: Problem, allow: frozenset[str], /) -> Advice:
        trace = problem.view.trace
        layout, blocks = static_layout(trace)
        shared = in_place(problem.view)
        rows = [
            ("largest sum of live storages (no layout is smaller)", format_bytes(layout.lower_bound_bytes)),
            ("static arena", f"{format_bytes(layout.peak_bytes)} (+{layout.overhead:.2%}, {layout.method}, {blocks} blocks)"),
            ("could be done in place", f"{shared.ops} ops, {format_bytes(shared.bytes_each_step)} a step; the peak would be {format_bytes(shared.peak_bytes)}"),
        ]  # fmt: skip
        figures: dict[str, float | int | str] = {
            "lower_bound_bytes": layout.lower_bound_bytes,
            "static_bytes": layout.peak_bytes,
            "method": layout.method,
            "blocks": blocks,
            "in_place_ops": shared.ops,
            "in_place_bytes": shared.bytes_each_step,
            "in_place_peak_bytes": shared.peak_bytes,
        }
        if trace.device.kind == "cpu":
            return Advice(
                strategy=self.name,
                verdict=f"One arena with fixed offsets would take {format_bytes(layout.peak_bytes)}, {layout.overhead:.2%} more than ever lives at once. "
                "On a CPU nothing of it can be changed from outside: each tensor is a malloc of its own.",
                rows=tuple(rows),
                figures=figures,
                peak_bytes=problem.unplanned_peak_bytes,
                notes=("--device NAME tells what the caching allocator of a GPU would reserve, and which setting helps",),
            )  # fmt: skip
        return self._on_gpu(trace, layout, rows, figures)

    def _on_gpu(
        self,
        trace: Trace,
        layout: StaticOffsets,
        rows: list[tuple[str, str]],
        figures: dict[str, float | int | str],
    ) -> Advice:
        reserved = reserved_bytes(trace)
        usual = recorded_settings(trace)
        now = reserved[usual]
        best = min(reserved, key=lambda text: (reserved[text], text != usual))
        gain = now - reserved[best]
        for text, size in reserved.items():
            rows.append((f"reserved with {text or 'the default settings'}", format_bytes(size)))
            figures[f"reserved_bytes {text or 'default'}"] = size
        helps = gain > _WORTH * now
        wasted = now - layout.lower_bound_bytes
        verdict = f"The caching allocator reserves {format_bytes(now)}, {format_bytes(wasted)} ({wasted / max(1, now):.1%}) more than ever lives at once. "
        verdict += (
            f"{best or 'The default settings'} recovers {format_bytes(gain)} of it."
            if helps
            else "No setting recovers more than 1 % of it."
        )
        action = ScriptAction(
            kind="allocator",
            what=best or "PyTorch's default settings",
            why=f"reserves {format_bytes(reserved[best])} instead of {format_bytes(now)}, by the simulated allocator",
            saved_bytes=gain,
            variables={"PYTORCH_ALLOC_CONF": best},
        )
        return Advice(
            strategy=self.name,
            verdict=verdict,
            rows=tuple(rows),
            figures=figures,
            peak_bytes=reserved[best] if helps else now,
            enforced=helps,
            actions=(action,) if helps else (),
            notes=("what is reserved has not been measured, but simulated",),
        )


@dataclass(frozen=True, slots=True)
class _Block:
    size_bytes: int
    birth: int
    death: int


def static_layout(trace: Trace) -> tuple[StaticOffsets, int]:
    """Offsets for all storages and workspaces of the iteration, to the byte, and how many they are."""
    recording = recording_of(trace, amounts_of(trace), target=trace.device.kind)
    birth: dict[int, int] = {}
    blocks: list[_Block] = []
    for position, event in enumerate(recording.events):
        row = abs(event) - 1
        if event > 0:
            birth[row] = position
        else:
            blocks.append(_Block(recording.rows[row].size_bytes, birth.pop(row), position))
    end = len(recording.events)
    blocks += [_Block(recording.rows[row].size_bytes, begin, end) for row, begin in birth.items()]
    blocks = [block for block in blocks if block.size_bytes]
    columns = np.array([(b.birth, b.death, b.size_bytes) for b in blocks], dtype=np.int64).reshape(-1, 3).T
    alignment = 512 if trace.device.kind == "cuda" else 64
    return plan_offsets(columns[0], columns[1], columns[2], alignment_bytes=alignment), len(blocks)


def recorded_settings(trace: Trace) -> str:
    """The allocator settings of the recorded run; empty for the defaults."""
    return trace.device.allocator if ":" in trace.device.allocator else ""


def reserved_bytes(trace: Trace) -> dict[str, int]:
    """Most that the caching allocator reserves with each of the settings, of the recorded run first."""
    recording = recording_of(trace, amounts_of(trace), target="cuda", passes=_PASSES)
    rows = [(abs(event), recording.rows[abs(event) - 1].size_bytes * (1 if event > 0 else -1)) for event in recording.events]  # fmt: skip
    events = AllocatorEvents.of([row for row in rows if row[1]])
    usual = recorded_settings(trace)
    tried = dict.fromkeys([usual, "", *SETTINGS])
    return {text: replay(events, parse_settings(text)).peak_reserved_bytes for text in tried}
