"""An ONNX file without its weights: a streaming skim of the protobuf wire format.

protobuf refuses a message above 2 GiB and would copy every embedded weight. This walks the file in a memory map,
enters only sub-messages larger than `SMALL_BYTES`, and leaves out the payload of every tensor larger than that, so
that gigabytes of weights become kilobytes of shapes and the pages that hold them are never read. What is left is a
smaller, equally valid `ModelProto`. Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import mmap
from pathlib import Path

from memopt.errors import BadFile, reason

SMALL_BYTES = 64 * 2**10
"""Tensors up to this size keep their values (shapes, axes, indices); larger ones are only shapes to us."""

MOST_SKIMMED_BYTES = 512 * 2**20
"""What is left of an honest model without its weights is megabytes; more is refused."""

_DEEPEST = 64

# message -> {field number: message inside}, for the fields in which tensors can hide
_INSIDE = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "Sparse"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "Sparse", 23: "Sparse"},
    "Sparse": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
}
_PAYLOAD = {4, 5, 6, 7, 9, 10, 11}  # float, int32, string, int64, raw, double, uint64 data

Buffer = bytes | mmap.mmap


def skim(path: Path) -> bytes:
    """The model file's bytes without large tensor payloads; `BadFile` when it is no sequence of protobuf fields."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise not_onnx(path, "it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return skim_bytes(data, path)
    except (OSError, ValueError) as error:
        raise BadFile(
            f"cannot read ONNX model {path}", why=reason(error), try_="memopt estimate MODEL.onnx"
        ) from error


def skim_bytes(data: Buffer, path: Path) -> bytes:
    """As `skim`, of bytes in memory; `path` is for the error's text."""
    try:
        return _message(data, 0, len(data), "Model", 0)
    except (_Broken, IndexError) as error:
        raise not_onnx(path, f"it is truncated or not protobuf: {error}") from error


def not_onnx(path: Path, why: str) -> BadFile:
    return BadFile(
        f"{path} is not an ONNX model",
        why=why,
        try_="torch.onnx.export(model, args, 'model.onnx', dynamo=True)",
    )


class _Broken(Exception):
    pass


def _message(data: Buffer, start: int, end: int, kind: str, depth: int) -> bytes:
    if depth > _DEEPEST:
        raise _Broken("messages are nested too deeply")
    inside = _INSIDE[kind]
    parts: list[bytes] = []
    at = start
    size = 0
    while at < end:
        field_start = at
        key, at = _varint(data, at, end)
        number, wire = key >> 3, key & 7
        value_start, at = _value(data, at, end, wire)
        if kind == "Tensor" and number in _PAYLOAD and wire == 2 and at - value_start > SMALL_BYTES:
            continue
        if wire == 2 and number in inside and at - value_start > SMALL_BYTES:
            body = _message(data, value_start, at, inside[number], depth + 1)
            part = _encode(key) + _encode(len(body)) + body
        else:
            part = data[field_start:at]
        size += len(part)
        if size > MOST_SKIMMED_BYTES:
            raise _Broken("more than 512 MiB of it is not weights")
        parts.append(part)
    return b"".join(parts)


def _value(data: Buffer, at: int, end: int, wire: int) -> tuple[int, int]:
    """Where a field's value starts and ends."""
    if wire == 0:
        return at, _varint(data, at, end)[1]
    if wire == 2:
        length, at = _varint(data, at, end)
    elif wire in (1, 5):
        length = 8 if wire == 1 else 4
    else:
        raise _Broken(f"byte {at} holds no protobuf field")
    if at + length > end:
        raise _Broken(f"a field at byte {at} claims {length} bytes, {end - at} are left")
    return at, at + length


def _varint(data: Buffer, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= end or shift > 63:
            raise _Broken(f"byte {at} ends a number too early")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _encode(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
