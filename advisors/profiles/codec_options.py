"""Which codec serves all the readers of a storage, and what it holds and costs, from the trace alone.

What readers need is known of their formulas (`slot_needs`). Where one needs values, a codec of values may serve: dropout's noise on a CPU
has two by construction, and of others the profile says what it found (`ValueFacts`), which each codec's row takes with a margin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memopt.codecs.meta import ITEM_BYTES, TensorMeta, whole_storage
from memopt.codecs.of_readers import is_proven_on
from memopt.codecs.row import Codec, Params
from memopt.codecs.table import CODECS
from memopt.device import Device
from memopt.estimators.simulator.costs import CODE_MS, LAUNCH_MS
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.slot_needs import VALUES, Need, needs_of, weakest_common_codec
from memopt.estimators.simulator.trace_view import Saved, TraceView

_DEFAULT_COPY_RATE = {"cpu": 8e9, "cuda": 5e11}
"""Bytes per second, where none was measured: on the low side, so that codecs seem rather dearer than they are."""


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The codec of a storage (`drop` when nothing is held) and what each of its slots needs."""

    decision: Decision
    needs: tuple[Need, ...]
    """In the order of `Saved.slots`. Of a codec of values: values, with what was planned."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one run of a codec encodes."""

    codec: Codec
    meta: TensorMeta
    params: Params


def codec_choice(view: TraceView, device: Device, saved: Saved) -> CodecChoice | None:
    """How to hold `saved` in fewer bytes without losing what backward reads; None: only as it is."""
    metas = [_meta(view, slot, device) for slot in saved.slots]
    known = [meta for meta in metas if meta is not None]
    if len(known) < len(metas):
        return None
    needs = tuple(slot_need(view, slot) for slot in saved.slots)
    if any(
        need != VALUES and view.trace.slots.consumer[slot] < 0
        for slot, need in zip(saved.slots, needs, strict=True)
    ):
        return None  # the enforcer checks the call that saves the tensor, and here nobody knows it
    of_values = {part.codec.name: part for part in _value_codecs(view, device, saved)}
    codec = weakest_common_codec(needs, of_values)
    if codec is None:
        return None
    if codec in of_values:
        parts = [of_values[codec]]
        needs = (_planned(parts[0]),) * len(needs)
    else:
        parts = [_Part(CODECS[n.kind], meta, n.parameters) for n, meta in zip(needs, known, strict=True)]
    if any(_device_type(device) not in part.codec.passes for part in parts):
        return None
    decision = _decision(device, codec, parts, view.pace)
    return CodecChoice(decision, needs) if decision.encoded_bytes < saved.size_bytes else None


def _planned(part: _Part) -> Need:
    return Need(VALUES.kind, tuple((name, value) for name, value in part.params.items() if isinstance(value, int | str)))  # fmt: skip


def slot_need(view: TraceView, slot: int) -> Need:
    """What backward reads of `slot`; sizes of the node's other saved tensors count among the node's attributes."""
    slots, strings = view.trace.slots, view.trace.strings
    node, torch_version = strings[slots.node[slot]], view.trace.script.torch
    if not node or (torch_version and not is_proven_on(torch_version)):
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


def _value_codecs(view: TraceView, device: Device, saved: Saved) -> Iterator[_Part]:
    """The codecs of values that may be planned for `saved`, the smallest form first."""
    found = []
    for codec in CODECS.values():
        if codec.of_values and _device_type(device) in codec.passes:
            part = _value_codec(view, device, saved, codec)
            if part is not None:
                found.append(part)
    yield from sorted(found, key=lambda part: part.codec.held_bytes(part.meta, part.params))


def _value_codec(view: TraceView, device: Device, saved: Saved, codec: Codec) -> _Part | None:
    strings, dtypes = view.trace.strings, {view.trace.slots.dtype[slot] for slot in saved.slots}
    if len(dtypes) > 1:
        return None
    meta = whole_storage(saved.size_bytes, strings[dtypes.pop()].removeprefix("torch."), device.kind)
    if meta is None:
        return None
    if codec.name == "two_valued" and is_dropout_noise(view, saved):
        return _Part(codec, meta, {})
    facts = view.value_facts.get(saved.storage)
    params = codec.planned(facts, meta) if facts is not None and facts.dtype == meta.dtype else None
    return _Part(codec, meta, params) if params is not None else None


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


def _decision(device: Device, name: str, parts: list[_Part], pace: float) -> Decision:
    """Price of codec `name`: one of values encodes once, the others slot by slot; every unpack decodes."""
    costs = [
        codec_costs_ms(part.codec, part.meta, device, pace, str(part.params.get("test"))) for part in parts
    ]
    return Decision(
        kind="drop" if name == "nothing" else "compress",
        codec=name,
        encoded_bytes=sum(p.codec.held_bytes(p.meta, p.params) for p in parts),
        transient_bytes=max(p.codec.encode_bytes(p.meta, p.params) for p in parts),
        decoded_bytes=max(
            p.codec.decoded_bytes(p.meta, p.params) + p.codec.decode_bytes(p.meta, p.params) for p in parts
        ),
        encode_ms=sum(encode for encode, _ in costs),
        decode_ms=sum(decode for _, decode in costs) / len(parts),
    )


def codec_costs_ms(
    codec: Codec, meta: TensorMeta, device: Device, pace: float, test: str
) -> tuple[float, float]:
    """What it takes to encode a tensor for a reader with this `test`, and to decode it, where the host has that `pace`."""
    kind = _device_type(device)
    copy_ms = 1000 / (device.copy_bytes_per_s or _DEFAULT_COPY_RATE[kind])
    passes = codec.passes[kind]
    code_ms = CODE_MS * pace if kind == "cpu" and passes.encode else 0.0
    return (
        code_ms + codec.encoding_ms(meta, passes, copy_ms, LAUNCH_MS * pace, test),
        code_ms + codec.decoding_ms(meta, passes, copy_ms, LAUNCH_MS * pace),
    )


def _device_type(device: Device) -> str:
    return "cpu" if device.kind == "cpu" else "cuda"
