"""Plan: what to do with which tensor on the next run. JSON that a person can read and edit."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from memopt.codecs.table import CODECS, is_of_values
from memopt.device import Device
from memopt.errors import BadFile
from memopt.files import read_bytes, write_atomic
from memopt.trace import Script
from memopt.versioned import decode_versioned

SCHEMA: Final = "memopt.plan/1"

ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""All that a plan may set in the environment of a run."""

OPTIMIZER_IN_BACKWARD: Final = "optimizer in backward"
"""`ScriptAction.what` of a decision about the optimizer that can be applied."""

OPTIMIZER_IN_PIECES: Final = "optimizer in pieces"
"""As above: its step on slices of the parameters, one after the other; with a tier its state is there between steps."""

OPTIMIZER_STATE_AWAY: Final = "optimizer state away"
"""As above: its step as it is, its state in a tier between steps; `optimizer in pieces` where some step is taken in pieces, too."""

GRADIENTS_IN_PLACE: Final = "gradients in place"
"""As above, about backward: a formula writes what it makes into the gradient that it uses up."""

WEIGHTS_STREAMED: Final = "frozen weights streamed"
"""As above, about weights that nothing trains: their home is a tier, and each comes for as long as something uses it."""

AS_LITTLE: Final = 0.006
"""Of a peak: plans that differ by less are alike, and whoever asks once more for the smallest peak that was found leaves so much room."""
NOT_MET: Final = "the budget cannot be met: "
"""How a note that says what holds the floor begins."""

_ENFORCED: Final = {
    OPTIMIZER_IN_BACKWARD: "optimizer",
    OPTIMIZER_IN_PIECES: "optimizer",
    OPTIMIZER_STATE_AWAY: "optimizer",
    GRADIENTS_IN_PLACE: "backward",
    WEIGHTS_STREAMED: "weights",
}
"""`ScriptAction.what` of decisions that can be applied, and their kind."""

Kind = Literal["keep", "swap", "recompute", "compress", "drop"]
Tier = Literal["host", "disk"]


class OpRef(msgspec.Struct, frozen=True, kw_only=True):
    """An op of the next run: the `ordinal`-th of the overload `name` that module call `module` runs itself."""

    module: str
    ordinal: int
    name: str


class SlotRef(msgspec.Struct, frozen=True, kw_only=True):
    """A saved tensor of the next run: the `ordinal`-th that module call `module` packs itself."""

    module: str
    ordinal: int
    node: str
    slot: str
    dtype: str
    dims: int
    consumer: str = ""
    """Overload of the op whose node saves it; a codec acts only when that op really comes next."""
    is_output: bool = False
    """The op has run already when the tensor is packed."""
    need: str = "values"
    """What backward reads (`estimators.simulator.slot_needs`): `values`, or what the codec of that name holds."""
    params: dict[str, float | int | str | bool | list[int]] = {}
    """What the codec must know: of the node (`{"dim": 1}`), or of what was planned (`{"narrow_dtype": "int16"}`)."""


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A weight leaves once more; the last three as in `Action`."""

    after: OpRef
    """The last op that reads it before backward."""
    away_by: SlotRef | None = None
    away_at_use: bool = False
    away_before: OpRef | None = None


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One decision about one storage and all the slots that share it."""

    kind: Kind
    storage: int
    """Its number in the profile."""
    label: str
    size_bytes: int
    slots: list[SlotRef]
    why: str
    saved_bytes: int
    """Bytes that the plan's peak falls by because of it."""
    cost_ms: float
    """Time that it adds to a step."""
    exact: bool = True
    tier: Tier | None = None
    codec: str = ""
    again: bool = False
    """Of a recompute: not held when it is made on the way to another tensor, but made again for its own consumers."""
    each: bool = False
    """Of a recompute: not held from one of its consumers to the next, but made again for each."""
    away_by: SlotRef | None = None
    """Of a swap: when this slot is packed, the run waits until the copy out is done, as the predicted peak takes it to be."""
    away_at_use: bool = False
    """The slot of `away_by` is packed too early: the run waits when it is unpacked, in backward."""
    away_before: OpRef | None = None
    """In place of `away_by`, where nothing is saved in time (a teacher runs without gradients): the run waits before this op."""
    leaves_after: OpRef | None = None
    """Of the swap of a weight, which has no slots: the last op of forward that reads it. Of a saved tensor for which a backward call that makes
    a graph (`create_graph`) asks first: the op at whose end it leaves, until it is asked for once more. Of one whose parts are written one after
    the other (the gates of a recurrent cell): the op at whose end all are."""
    leaves_again: list[Departure] = []
    """Of the same in an iteration of several backward calls: before the others of them. Nothing is prefetched there."""
    prefetch: SlotRef | None = None
    """The swap-in starts when this slot is unpacked, or the tensor is made again then, while what it is made of is still there; none: when the
    tensor itself is asked for."""
    turn: int = 0
    """Of what is prefetched: what starts at one moment goes in this order."""
    records: list[OpRef] = []
    """Ops to be remembered in forward so that the tensor can be made again."""
    copied_back: list[OpRef] = []
    """Clones from whose results what they cloned is made again, where one of `records` reads that."""
    line: str = ""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """An unpack at which a swap-in may start in place of its planned one, where the run shows that it should."""

    module: str
    ordinal: int
    """As in `SlotRef`."""
    at_ms: float
    """When it comes, by prediction."""
    room_bytes: int
    """What the predicted peak leaves of the budget from there to the next moment; negative where it passes it."""


class ScriptAction(msgspec.Struct, frozen=True, kw_only=True):
    """One decision about the run as a whole. Those of the kind `allocator`, and those called `optimizer in backward`, `optimizer in pieces`,
    `optimizer state away`, `gradients in place` and `frozen weights streamed` can be applied; others are advice."""

    kind: Literal["allocator", "optimizer", "model", "backward", "weights"]
    what: str
    why: str
    saved_bytes: int
    variables: dict[str, str] = {}
    """Environment of the run, of an `allocator` action."""
    parameters: int = 0
    """Of `optimizer in backward`: how many parameters are stepped there; of `optimizer in pieces`, too, and of `optimizer state away` and
    `frozen weights streamed` how many tensors leave."""
    cost_ms: float = 0.0
    """Time that it adds to a step."""
    piece_bytes: int = 0
    """Of `optimizer in pieces`: bytes of parameters that are stepped at once."""
    tier: Tier | None = None
    """Of `optimizer in pieces` and `optimizer state away`: where its state is between steps; none: on the device. Of `frozen weights streamed`:
    where those are."""
    away_bytes: int = 0
    """Of the three: how much is there."""
    whole_from_bytes: int = 0
    """Of both ways of the optimizer: where it cannot step in pieces, tensors of state that have so many bytes or more are there; 0: none."""
    away: int = 0
    """Of `optimizer in pieces`: the state of so many parameters, the largest of each optimizer; 0: of all."""
    gradient_bytes: int = 0
    """Of `optimizer in pieces`: so many bytes of gradients are there from when they are whole until they are cleared; 0: none."""
    ops: int = 0
    """Of `gradients in place`: how many ops write into a gradient."""
    least_bytes: int = 0
    """Of `gradients in place` and `frozen weights streamed`: what has fewer bytes is left alone."""
    ahead: bool = False
    """Of `frozen weights streamed`: while one is used, the next is on its way."""
    cleared_late: bool = False
    """Of `optimizer in backward` and `optimizer in pieces`: the script clears gradients after the next forward has begun, so that what a step asked for goes back to the tier, and so do
    those of the last step before a plan that begins while the script runs."""

    @property
    def can_be_applied(self) -> bool:
        return self.kind in ("allocator", _ENFORCED.get(self.what))


def _way_of_stepping(pieces: ScriptAction) -> tuple[object, ...]:
    sends_gradients = pieces.gradient_bytes > 0
    return pieces.what, pieces.piece_bytes, pieces.tier, pieces.away, pieces.whole_from_bytes, sends_gradients, pieces.cleared_late  # fmt: skip


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The actions, and what they were decided from."""

    schema: Literal["memopt.plan/1"] = SCHEMA
    memopt: str
    created: str
    script: Script
    device: Device
    profile: str
    strategy: str
    budget_bytes: int
    """What tensors may have."""
    unplanned_peak_bytes: int
    predicted_peak_bytes: int
    plain_step_ms: float
    predicted_step_ms: float
    whole_budget_bytes: int = 0
    """What was asked for, where that is for all that the process holds on its GPU: the context and the allocator's gaps too."""
    iteration: int = 0
    """Which one was profiled; 0 when not known. One of the first two is of a script that makes no more."""
    optimizers: int = 0
    """How many stepped before the first whole iteration had ended; 0 when not known."""
    base_bytes: int = 0
    """On the device when the profiled iteration began; 0 when not known."""
    saved_tensors: int = 0
    """How many tensors autograd saved in the profiled iteration; 0 when not known."""
    saved_elements: int = 0
    """Their elements together: an iteration that saves others is another one than was planned for."""
    saved_bytes: int = 0
    """The same in bytes; 0 when not known."""
    state_beside_bytes: int = 0
    """Optimizer state that the recorded iteration had in a tier between steps, where it stays beside this plan; not in `unplanned_peak_bytes`."""
    without_gradients: bool = False
    """Were modules called without gradients in the profiled iteration (a teacher)? Where they were not, such calls are an evaluation."""
    workspace_calls: dict[str, list[tuple[int, int]]] = {}
    """Overload -> of its largest calls the bytes that one reads and gives, and those that it takes beside them; of those that take much."""
    grown: float = 1.0
    """It was made for an iteration that saves so many times as much as the profiled one, since iterations differ in size."""
    host_bytes: int = 0
    """Most bytes that the actions have in the host's memory at once; 0 when not known."""
    actions: list[Action]
    script_actions: list[ScriptAction] = []
    moments: list[Moment] = []
    """Of a plan that swaps: where in backward a swap-in may start, in order."""
    notes: list[str] = []

    @property
    def in_backward(self) -> ScriptAction | None:
        """The decision to step the optimizer inside backward, if it is made."""
        return self._decided(OPTIMIZER_IN_BACKWARD)

    @property
    def in_pieces(self) -> ScriptAction | None:
        """The decision to step the optimizer in pieces, or to have its state away between steps, if it is made."""
        return self._decided(OPTIMIZER_IN_PIECES) or self._decided(OPTIMIZER_STATE_AWAY)

    @property
    def moves_the_step(self) -> bool:
        """Does it say how the optimizer steps, or where its state is?"""
        return self.in_backward is not None or self.in_pieces is not None

    def steps_as(self, other: Plan) -> bool:
        """Does the optimizer step in pieces, with state in a tier or without, and as under `other`?"""
        own, others = self.in_pieces, other.in_pieces
        if own is None or others is None or self.in_backward is not None or other.in_backward is not None:
            return False
        return _way_of_stepping(own) == _way_of_stepping(others)

    @property
    def in_place(self) -> ScriptAction | None:
        """The decision to write over gradients that are used up, if it is made."""
        return self._decided(GRADIENTS_IN_PLACE)

    @property
    def streamed(self) -> ScriptAction | None:
        """The decision to stream frozen weights, if it is made."""
        return self._decided(WEIGHTS_STREAMED)

    def _decided(self, what: str) -> ScriptAction | None:
        return next((a for a in self.script_actions if a.what == what and a.kind == _ENFORCED[what]), None)

    @property
    def over_bytes(self) -> int:
        """By how much the predicted peak passes the budget."""
        return max(0, self.predicted_peak_bytes - self.budget_bytes)

    def is_better_than(self, other: Plan) -> bool:
        """For the same budget: is it passed by less, or about as little and the step shorter?"""
        both_above = self.over_bytes > 0 < other.over_bytes
        if both_above and abs(self.over_bytes - other.over_bytes) <= AS_LITTLE * other.predicted_peak_bytes:
            return self.predicted_step_ms < other.predicted_step_ms
        return (self.over_bytes, self.predicted_step_ms) < (other.over_bytes, other.predicted_step_ms)

    def save(self, path: Path) -> None:
        """Write the plan, indented, whole or not at all."""
        kept = msgspec.structs.replace(self, script=self.script.kept_in(path))
        write_atomic(path, msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")


def load_plan(path: Path) -> Plan:
    """The plan at `path`. Raises `BadFile` when it is not a whole, consistent plan of this version."""
    plan = decode_versioned(read_bytes(path, "plan"), Plan, SCHEMA, path, "plan")
    problem = _inconsistency(plan)
    if problem:
        raise BadFile(
            f"{path} is not a usable plan", why=problem, try_="memopt advise PROFILE, to write it again"
        )
    return msgspec.structs.replace(plan, script=plan.script.read_from(path))


def _inconsistency(plan: Plan) -> str:
    numbers = [plan.budget_bytes, plan.unplanned_peak_bytes, plan.predicted_peak_bytes, plan.base_bytes]
    numbers.append(plan.host_bytes)
    if min(numbers) < 0 or max(numbers) >= 2**62:
        return "a number of bytes is negative or beyond any memory"
    if not 1 <= plan.grown < 1e6:
        return "an iteration cannot grow by such a factor"
    if not all(0 <= time < 1e12 for time in (plan.plain_step_ms, plan.predicted_step_ms)):
        return "a time is negative, not finite, or longer than eleven days"
    if not plan.script.argv or not plan.script.argv[0]:
        return "it names no script"
    if plan.script.problem:
        return plan.script.problem
    for number, action in enumerate(plan.actions):
        problem = _bad_action(action)
        if problem:
            return f"action {number} ({action.kind} {action.label[:60]}): {problem}"
    pieces = plan.in_pieces
    if pieces is not None and pieces.what == OPTIMIZER_STATE_AWAY:
        if pieces.piece_bytes or pieces.tier is None or not 0 < pieces.whole_from_bytes < 2**62:
            return "it does not tell what of the optimizer's state is to be away, or where"
    elif pieces is not None and not (0 < pieces.piece_bytes < 2**62 and 0 <= pieces.whole_from_bytes < 2**62):
        return f"an optimizer cannot be stepped in pieces of {pieces.piece_bytes} bytes"
    if plan.streamed is not None and (
        plan.streamed.tier is None or not 0 < plan.streamed.least_bytes < 2**62
    ):
        return "it does not tell which frozen weights are streamed, or from where"
    for each in plan.script_actions:
        for name, value in each.variables.items():
            if name not in ALLOCATOR_VARIABLES or each.kind != "allocator":
                return f"script action '{each.what[:60]}' sets {name[:40]}, which is no plan's business"
            if "\0" in value:
                return f"script action '{each.what[:60]}' sets {name[:40]} to something with a zero byte"
    return ""


def _bad_action(action: Action) -> str:
    if not 0 <= action.size_bytes < 2**62:
        return f"{action.size_bytes} bytes"
    if not 0 <= action.cost_ms < 1e12:
        return f"{action.cost_ms} ms"
    ordinals = [slot.ordinal for slot in action.slots] + [op.ordinal for op in action.records]
    if any(ordinal < 0 for ordinal in ordinals):
        return "a negative ordinal"
    if action.kind == "swap" and action.tier is None:
        return "a swap names its tier, 'host' or 'disk'"
    if action.kind in ("compress", "drop"):
        return _bad_codec(action)
    if action.kind == "recompute" and not action.records:
        return "a recompute names the ops that it records"
    return ""


def _bad_codec(action: Action) -> str:
    if action.codec not in CODECS:
        return f"there is no codec '{action.codec[:40]}'"
    for need in sorted({slot.need for slot in action.slots}):
        if need != "values" and (need not in CODECS or is_of_values(need)):
            return f"no backward needs '{need[:40]}' of a tensor"
    return ""
