"""Updates: how the optimizer was used in the recorded iteration, for whoever wants to step parameters inside backward."""

from __future__ import annotations

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an optimizer's step; storages and ops are those of the trace."""

    begin_op: int
    """First op of it."""
    end_op: int
    """First op after it."""
    in_pieces: str
    """Why it cannot be taken in pieces; empty when it can."""
    state_stays: str
    """Why the optimizer's state cannot be away between steps; empty when it can."""
    state: list[int] = []
    """Storages of its state that nothing else holds."""


class Updates(msgspec.Struct, frozen=True, kw_only=True):
    """One row a parameter whose gradient became ready in backward; storages and ops are those of the trace."""

    optimizer: str
    """`AdamW`."""
    refused: str = ""
    """Why the optimizer cannot step inside backward; empty when it can."""
    gradients_stay: str | None = None
    """Why gradients cannot be in a tier between backward and the step; empty when they can, none where nobody looked. Where it is empty,
    the rows are there, whatever `refused` says."""
    begin_op: int = 0
    """First op of the step."""
    end_op: int = 0
    """First op after it."""
    parameter: list[int] = []
    gradient: list[int] = []
    ready_before: list[int] = []
    """First op that started after the gradient was whole."""
    old_gradients: list[int] = []
    """Gradients of the iteration before that were still there when this one began."""
    others_read: int | None = None
    """So often was the gradient of a tensor read that the optimizer does not step; none where nobody looked."""
    in_pieces: str | None = None
    """Why an optimizer that stepped cannot step in pieces; empty when all can, none where nobody looked."""
    steps: list[Step] = []
    """All of the iteration."""
