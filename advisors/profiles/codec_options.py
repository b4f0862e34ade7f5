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
    pieces_of,
    predicted_bytes,
)
from memopt.estimators.simulator.decision import VALUE_CODECS, Decision
from memopt.estimators.simulator.slot_needs import VALUES, Need, needs_of, weakest_common_codec
from memopt.estimators.simulator.trace_view import Saved, TraceView

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
_DEFAULT_COPY_RATE = {"cpu": 8e9, "cuda": 5e11}
"""Bytes per second, where none was measured."""
_PASSES = {
    "cpu": {"nothing": (0.0, 0.0), "predicate": (3.0, 1.6), "pool_index": (12.0, 12.0), "two_valued": (3.0, 1.6)},
    "cuda": {"nothing": (0.0, 0.0), "predicate": (3.7, 1.6), "pool_index": (3.5, 3.0)},
}  # fmt: skip
"""How long encoding and decoding take, in copies of the tensor: measured on a CPU; on a GPU what their kernels read and write. Asking a
16 bit float takes as long as asking one of 32."""
_QUICKLY_ASKED = {"relu": 2.0, "mask": 1.1}
"""On a GPU: questions that need no kernel of the reader's."""
_LAUNCHES = {"predicate": (12, 8), "pool_index": (14, 12)}
"""Kernels to encode and to decode a piece of a tensor on a GPU."""
_LAUNCH_MS = 5e-3
"""Of the host for one kernel; the shortest kernels take about as long."""


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
    encoded = transient = decoded = 0
    encode_ms = decode_ms = 0.0
    for position, (slot, need) in enumerate(zip(saved.slots, needs, strict=True)):
        meta = _meta(view, slot, device)
        assert meta is not None
        kind = codec if whole else need.kind
        if not (whole and position):
            encoded += predicted_bytes(kind, meta, need.parameters)
            costs = _costs_ms(kind, meta, device, str(need.parameters.get("test")))
            encode_ms, decode_ms = encode_ms + costs[0], decode_ms + costs[1]
        transient = max(transient, encode_transient_bytes(kind, meta, need.parameters))
        decoded = max(
            decoded,
            decoded_bytes(kind, meta, need.parameters) + decode_transient_bytes(kind, meta, need.parameters),
        )
    return Decision(
        kind="drop" if codec == "nothing" else "compress",
        codec=codec,
        encoded_bytes=encoded,
        transient_bytes=transient,
        decoded_bytes=decoded,
        encode_ms=encode_ms,
        decode_ms=decode_ms if whole else decode_ms / max(1, len(saved.slots)),
    )


def _costs_ms(codec: str, meta: TensorMeta, device: Device, test: str) -> tuple[float, float]:
    """What it takes to encode a tensor, and to decode it."""
    kind = "cpu" if device.kind == "cpu" else "cuda"
    encode, decode = _PASSES[kind][codec]
    asked = meta.cells * (max(4, meta.itemsize) if codec == "predicate" else meta.itemsize)
    copy_ms = 1000 / (device.copy_bytes_per_s or _DEFAULT_COPY_RATE[kind])
    if kind == "cpu":
        return encode * asked * copy_ms, decode * meta.cells * meta.itemsize * copy_ms
    launched = [_LAUNCH_MS * count * pieces_of(codec, meta) for count in _LAUNCHES.get(codec, (0, 0))]
    encode = _QUICKLY_ASKED.get(test, encode) if codec == "predicate" else encode
    return max(launched[0], encode * asked * copy_ms), max(launched[1], decode * asked * copy_ms)
