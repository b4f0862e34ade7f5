"""Are gradients cleared between each step and the next backward call, whatever happens? Read off the bytecode of the caller.

A must-analysis over the control flow graph of one function, exception handlers included. Either `zero_grad` lies on every path
to the backward call, from the function's start and round every loop; or it lies on every path from the step to the function's
end and to the next backward call, and each call of the function leaves cleared what the next one finds.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

from memopt.instrument.stepping.step_after_backward import LOADS, PASSED_OVER, find

NOT_CLEARED = "it is not sure that gradients are cleared before the next backward call"
_ENDS = ("RETURN", "RERAISE", "RAISE")
Path = tuple[str, ...]


def is_cleared(frame: FrameType, optimizer: torch.optim.Optimizer) -> bool:
    """Does `frame`, which is in a backward call and steps `optimizer` right after it, always clear what that leaves behind?"""
    graph = _graph(frame.f_code)
    ours = {at for at, path in graph.clears.items() if _clears(find(frame, path), optimizer)}
    call = max(
        at for at in graph.after if at <= frame.f_lasti
    )  # it may stand in the caches that follow the call
    return any(_holds(graph, ours, call, at_start=known) for known in (False, True))


def _clears(owner: object, optimizer: torch.optim.Optimizer) -> bool:
    if owner is optimizer:
        return True
    if not isinstance(owner, torch.nn.Module):
        return False
    cleared = {id(parameter) for parameter in owner.parameters()}
    return all(id(each) in cleared for group in optimizer.param_groups for each in group["params"])


class _Graph:
    """Instructions by offset: where each may lead, and which look up `zero_grad`, on what."""

    def __init__(self, code: CodeType) -> None:
        self.after: dict[int, list[int]] = {}
        self.ends: set[int] = set()
        self.clears: dict[int, Path] = {}
        instructions = list(dis.get_instructions(code))
        self.start = instructions[0].offset
        path: Path = ()
        for place, each in enumerate(instructions):
            path = self._name(each, path)
            following = instructions[place + 1].offset if place + 1 < len(instructions) else -1
            self.after[each.offset] = list(_leads_to(each, following))
            if each.opname.startswith("RETURN"):
                self.ends.add(each.offset)
        for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
            for offset in self.after:
                if entry.start <= offset < entry.end:
                    self.after[offset].append(entry.target)

    def _name(self, each: dis.Instruction, path: Path) -> Path:
        """The names that lead to what was loaded last; notes look-ups of `zero_grad` on the way."""
        if each.opname in LOADS:
            return (str(each.argval),)
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
            if each.argval == "zero_grad":
                self.clears[each.offset] = path
            return (*path, str(each.argval))
        return path if each.opname in PASSED_OVER else ()


_graphs: dict[CodeType, _Graph] = {}


def _graph(code: CodeType) -> _Graph:
    if code not in _graphs:
        _graphs[code] = _Graph(code)
    return _graphs[code]


def _leads_to(each: dis.Instruction, following: int) -> Iterator[int]:
    name = each.opname
    jumps = each.opcode in dis.hasjrel or each.opcode in dis.hasjabs
    if jumps:
        yield int(each.argval)
    always = jumps and name.startswith(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE"))
    if not always and not name.startswith(_ENDS) and following >= 0:
        yield following


def _holds(graph: _Graph, clears: set[int], backward: int, *, at_start: bool) -> bool:
    """Is all cleared whenever `backward` is reached, and, where that was supposed of the start, at each end too?"""
    found = {graph.start: at_start}
    waiting = [graph.start]
    while waiting:
        offset = waiting.pop()
        before = found[offset]
        after = True if offset in clears else before and offset != backward
        for target in graph.after[offset]:
            known = found.get(target)
            if known is None or (known and not after):
                found[target] = after
                waiting.append(target)
    if not found.get(backward, False):
        return False
    return not at_start or all(found.get(end, True) for end in graph.ends)
