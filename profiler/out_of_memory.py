"""What is on the device at one moment, found without having recorded anything: for a script that has just run out of memory.

Nothing is allocated on the device and no hook of anybody's is called: tensors are found among the objects of the process, and what
autograd has saved in the nodes of the graphs that they hang on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import torch
from torch import Tensor
from torch.autograd.graph import Node

from memopt.device import Device
from memopt.instrument.frames import Frames
from memopt.instrument.live_objects import living
from memopt.instrument.nodes import node_of
from memopt.profiler.known import device_in_use, tell_all, there_now
from memopt.profiler.storages import describe
from memopt.trace import CATEGORIES, LEFT_OVER, Csr, Ops, Script, Slots, Storages, Trace, Values
from memopt.version import VERSION

_MOST_NODES = 2_000_000
_NEAR = 6
"""Ops between a tensor that autograd holds and the module that it is said to come after."""


def trace_of_now(script: Script, partial: str, line: str = "") -> Trace:
    """A profile of this moment, of one row that is no op: every storage on the device that the script's parameters are on, or that is
    in use. `partial` says why there is no more, `line` where the script is."""
    there = there_now()
    kind = device_in_use(there.modules)
    if kind == "cpu" and torch.accelerator.is_available() and _bytes_in_use():
        kind = str(torch.accelerator.current_accelerator())
    found = _Found(kind)
    names = tell_all(found.tell, Frames(), there, lists=True)
    for tensor, node, slot in _saved():
        found.tell(tensor, "activation", f"saved by {node.name()} ({slot}){_where(node, names)}")
    return found.trace(script, partial, line)


def _bytes_in_use() -> int:
    return int(torch.accelerator.memory_allocated()) if torch.accelerator.is_available() else 0


def _where(node: Node | None, names: dict[int, str]) -> str:
    """` at Net.fc` where the op of `node` reads a parameter of that module, ` after Net.fc` where what it reads comes from there;
    empty where neither is near."""
    word = "at"
    for _ in range(_NEAR):
        if node is None:
            break
        before = [each for each, _ in node.next_functions if each is not None]
        for leaf in (
            *before,
            *(
                each
                for turned in before
                if turned.name() == "TBackward0"
                for each, _ in turned.next_functions
            ),
        ):
            module = names.get(id(getattr(leaf, "variable", None)), "").rpartition(".")[0]
            if module:
                return f" {word} {module}"
        node, word = before[0] if before else None, "after"
    return ""


def _saved() -> Iterator[tuple[Tensor, Node, str]]:
    """Tensors that autograd holds for a backward that is still to come, and the node and slot that hold each."""
    stack = [node for tensor in living(Tensor)[0] if (node := node_of(tensor)) is not None]
    seen = set(stack)
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                with contextlib.suppress(RuntimeError):  # freed by a backward
                    raw = getattr(node, name)
                    for each in raw if isinstance(raw, (list, tuple)) else (raw,):
                        held = getattr(each, "data", None)
                        held = getattr(held, "tensor", held)
                        if isinstance(held, Tensor):
                            yield held, node, name.removeprefix("_raw_saved_")
        fresh = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= fresh
        stack += fresh


class _Found:
    """Storages, each under the name that it was told first."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._rows: dict[int, tuple[int, str, str]] = {}

    def tell(self, tensor: Tensor, category: str, name: str) -> None:
        with contextlib.suppress(
            RuntimeError, NotImplementedError
        ):  # without a storage: sparse, a subclass, ...
            storage = tensor.untyped_storage()
            if storage.device.type != self._kind or not storage.nbytes():
                return
            key = storage.data_ptr()
            known = self._rows.get(key)
            if key and (known is None or (known[2].startswith(LEFT_OVER) and not name.startswith(LEFT_OVER))):
                self._rows[key] = (storage.nbytes(), category, f"{name} · {describe(tensor)}")

    def trace(self, script: Script, partial: str, line: str) -> Trace:
        rows = sorted(self._rows.values(), key=lambda row: (-row[0], row[2]))
        named = sum(row[0] for row in rows)
        total = max(named, _bytes_in_use() if self._kind != "cpu" else 0)
        strings = ["", "memopt.moment", "@", line]
        places: dict[str, int] = {}
        for _, _, label in rows:
            places.setdefault(label, len(strings) + len(places))
        count = len(rows)
        empty = Csr.of([])
        return Trace(
            memopt=VERSION,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            script=msgspec.structs.replace(script, torch=str(torch.__version__)),
            device=_device(self._kind),
            strings=strings + list(places),
            ops=Ops(
                name=[1], module=[2], ordinal=[0], phase=[3], flags=[0], line=[3], time_us=[0.0], live_bytes=[named],
                extra_bytes=[total - named], workspace_bytes=[total - named], reads=Csr.of([[]]), writes=Csr.of([[]]), forward_op=[-1],
            ),
            values=Values(storage=list(range(count)), producer=[-1] * count, output=[-1] * count),
            storages=Storages(
                size_bytes=[row[0] for row in rows],
                category=[CATEGORIES.index(row[1]) for row in rows],
                birth_op=[-1] * count,
                death_op=[1] * count,
                only_saved_from=[-1] * count,
                label=[places[row[2]] for row in rows],
                line=[0] * count,
            ),
            slots=Slots(
                storage=[], value=[], module=[], ordinal=[], node=[], slot=[], dtype=[], shape=empty, stride=empty, offset=[],
                consumer=[], packed_before=[], unpacks=empty, plain=[], attributes=[],
            ),
            iteration=1,
            step_ms=0.0,
            peak_bytes=total,
            base_bytes=total,
            notes=["it was not being recorded: this is what was found on the device when it happened, without ops"],
            facts={"stopped_at_op": 0},
            partial=partial,
        )  # fmt: skip


def _device(kind: str) -> Device:
    if kind == "cuda":
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        return Device(
            kind=kind, name=properties.name, memory_bytes=int(properties.total_memory), allocator="native"
        )
    return Device(kind=kind, name=kind, allocator=kind)
