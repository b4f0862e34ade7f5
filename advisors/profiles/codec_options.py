"""Which codec serves all the readers of a storage, and what it holds and costs, from the trace alone.

Only codecs whose gain is sure before the run: values never read, predicates, pool indices, and the noise of CPU dropout
(two values by construction). Codecs that depend on the data (`zero_bitmap`, `narrow_int`, `exact_cast`) are left out: a
profile says nothing of what they would hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from memopt.device import Device
from memopt.estimators.simulator.codec_sizes import (
    TensorMeta,
    decode_transient_bytes,
    decoded_bytes,
    encode_transient_bytes,
    predicted_bytes,
)
from memopt.estimators.simulator.decision import VALUE_CODECS, Decision
from memopt.estimators.simulator.slot_needs import VALUES, Need, needs_of, weakest_common_codec
from memopt.estimators.simulator.trace_view import Saved, TraceView

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
_DEFAULT_COPY_RATE = 8e9
_ENCODE_PASSES = {"nothing": 0.0, "predicate": 3.0, "pool_index": 12.0, "two_valued": 3.0}
"""How long encoding takes, in copies of the tensor; asking a 16 bit float takes as long as asking one of 32."""
_DECODE_PASSES = {"nothing": 0.0, "predicate": 1.6, "pool_index": 12.0, "two_valued": 1.6}


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The codec of a storage (`drop` when nothing is held) and what each of its slots needs."""

    decision: Decision
    needs: tuple[Need, ...]
    """In the order of `Saved.slots`."""


def codec_choice(view: TraceView, device: Device, saved: Saved) -> CodecChoice | None:
    """How to hold `saved` in fewer bytes without losing what backward reads; None: only as it is."""
    if any(_meta(view, slot, device) is None for slot in saved.slots):
        return None
    needs = tuple(slot_need(view, slot) for slot in saved.slots)
    if any(
        need != VALUES and view.trace.slots.consumer[slot] < 0
        for slot, need in zip(saved.slots, needs, strict=True)
    ):
        return None  # the enforcer checks the call that saves the tensor, and here nobody knows it
    codec = weakest_common_codec(needs)
    if codec is None and device.kind == "cpu" and is_dropout_noise(view, saved):
        codec = "two_valued"  # which two has to be looked up: on a GPU that would wait for the device
    if codec is None:
        return None
    decision = _decision(view, device, saved, codec, needs)
    return CodecChoice(decision, needs) if decision.encoded_bytes < saved.size_bytes else None


def slot_need(view: TraceView, slot: int) -> Need:
    """What backward reads of `slot`; sizes of the node's other saved tensors count among the node's attributes."""
    slots, strings = view.trace.slots, view.trace.strings
    node = strings[slots.node[slot]]
    if not node:
        return VALUES
    attributes = view.slot_attributes(slot)
    for other in siblings(view, slot):
        attributes[f"{strings[slots.slot[other]]}.size"] = slots.shape.row(other)
    return needs_of(node, strings[slots.slot[slot]], attributes)


def siblings(view: TraceView, slot: int) -> list[int]:
    """The slots that the same node saved, `slot` among them."""
    slots = view.trace.slots
    own = (slots.consumer[slot], slots.node[slot])

    def is_same(other: int) -> bool:
        return 0 <= other < len(slots.node) and (slots.consumer[other], slots.node[other]) == own

    first = last = slot
    while is_same(first - 1):
        first -= 1
    while is_same(last + 1):
        last += 1
    return list(range(first, last + 1))


def is_dropout_noise(view: TraceView, saved: Saved) -> bool:
    """Is it the noise that CPU dropout multiplies with: 0 or 1/(1-p), made by `bernoulli_` and a division in place?"""
    writers = [
        view.trace.op_name(op).split(".")[1]
        for op, value in view.value_times[saved.storage]
        if op >= 0 and value <= saved.value
    ]
    return "bernoulli_" in writers and set(writers) <= {
        "empty_like",
        "empty",
        "new_empty",
        "bernoulli_",
        "div_",
        "mul_",
    }


def _meta(view: TraceView, slot: int, device: Device) -> TensorMeta | None:
    slots = view.trace.slots
    dtype = view.trace.strings[slots.dtype[slot]].removeprefix("torch.")
    item = ITEM_BYTES.get(dtype)
    if item is None:
        return None
    return TensorMeta(
        size=tuple(slots.shape.row(slot)),
        stride=tuple(slots.stride.row(slot)),
        storage_offset=slots.offset[slot],
        dtype=dtype,
        itemsize=item,
        device=device.kind,
    )


def _decision(view: TraceView, device: Device, saved: Saved, codec: str, needs: tuple[Need, ...]) -> Decision:
    """Price of `codec`: a storage-wide codec encodes once, the others slot by slot; every unpack decodes."""
    whole = codec in VALUE_CODECS
    encoded = transient = decoded = asked = walked = 0
    for position, (slot, need) in enumerate(zip(saved.slots, needs, strict=True)):
        meta = _meta(view, slot, device)
        assert meta is not None
        kind = codec if whole else need.kind
        if not (whole and position):
            encoded += predicted_bytes(kind, meta, need.parameters)
            if kind != "nothing":
                walked += meta.cells * meta.itemsize
                asked += meta.cells * (max(4, meta.itemsize) if kind == "predicate" else meta.itemsize)
        transient = max(transient, encode_transient_bytes(kind, meta, need.parameters))
        decoded = max(
            decoded,
            decoded_bytes(kind, meta, need.parameters) + decode_transient_bytes(kind, meta, need.parameters),
        )
    rate = device.copy_bytes_per_s or _DEFAULT_COPY_RATE
    encode_ms = _ENCODE_PASSES[codec] * asked / rate * 1000
    decode_ms = _DECODE_PASSES[codec] * walked / rate * 1000
    return Decision(
        kind="drop" if codec == "nothing" else "compress",
        codec=codec,
        encoded_bytes=encoded,
        transient_bytes=transient,
        decoded_bytes=decoded,
        encode_ms=encode_ms,
        decode_ms=decode_ms if whole else decode_ms / max(1, len(saved.slots)),
    )
