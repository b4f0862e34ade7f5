"""Codecs on a GPU never wait for it: meta tensors, which stand for a GPU's here, have no value that could be waited for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memopt.advisors.profiles.codec_options import codec_costs_ms
from memopt.codecs.table import CODECS
from memopt.device import Device
from memopt.enforcers.codecs import pool_index as codec_pool_index
from memopt.enforcers.codecs import predicate as codec_predicate
from memopt.enforcers.codecs.encoded import meta_of
from memopt.instrument.ops import kind_of

QUESTIONS = [
    {"test": "relu"},
    {"test": "mask"},
    {"test": "leaky_relu", "negative_slope": 0.1},
    {"test": "hardtanh", "min_val": -1.0, "max_val": 1.0},
]


@pytest.fixture(autouse=True)
def _fakes_are_plain(monkeypatch):
    for module in (codec_predicate, codec_pool_index):
        monkeypatch.setattr(module, "is_plain", lambda tensor: True)


@pytest.mark.parametrize("params", QUESTIONS, ids=lambda params: params["test"])
def test_a_yes_or_no_is_encoded_and_decoded_without_a_look_at_the_values(params, monkeypatch):
    dtype = torch.bool if params["test"] == "mask" else torch.bfloat16
    tensor = torch.empty(3, 1000, 7, device="meta", dtype=dtype)
    answers = codec_predicate.Answers(1.0, 0.0, torch.empty((), device="meta", dtype=dtype))
    monkeypatch.setattr(codec_predicate, "_yes_and_no", lambda *_: answers)
    encoded = codec_predicate.encode(tensor, params)
    assert encoded is not None
    assert encoded.payload[0].numel() == 3 * 1000 * 7 // 8
    decoded = codec_predicate.decode(encoded)
    assert (decoded.shape, decoded.dtype, decoded.device.type) == (tensor.shape, dtype, "meta")


def test_pool_indices_are_encoded_and_decoded_without_a_look_at_the_values():
    params = {"self.size": [2, 3, 16, 16], "kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1]}
    indices = torch.empty(2, 3, 8, 8, device="meta", dtype=torch.int64)
    encoded = codec_pool_index.encode(indices, params)
    assert encoded is not None
    assert encoded.payload[0].numel() == indices.numel() // 2
    assert codec_pool_index.decode(encoded).shape == indices.shape


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kernel", [(2, 2), (3, 5), (2, 3, 4)])
def test_the_last_step_is_the_largest(kernel, dilation):
    rank = len(kernel)
    window = codec_pool_index._Window(kernel, (1,) * rank, (0,) * rank, (dilation,) * rank, (11, 13, 17)[:rank])  # fmt: skip
    assert window.last_step == int(window.steps("cpu").max())


class Traffic(TorchDispatchMode):
    """Counts kernels, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if not kind_of(func).is_view and not any(word in name for word in ("empty", "set_", "detach")):
            given = dict(kwargs or {})
            given.pop("out", None)
            overwrites = name.split(".")[0] in ("aten::copy_", "aten::fill_", "aten::zero_")
            reads = [t for t in tree_leaves((args[overwrites:], given)) if isinstance(t, torch.Tensor)]
            written = [out] if isinstance(out, torch.Tensor) else []
            self.kernels += 1
            if "index.Tensor" in name:  # of the table only what is picked
                reads = [t for t in reads if t.dtype == torch.int64 or t.dtype == torch.int32]
                self.bytes += out.nbytes
            self.bytes += sum(t.nbytes for t in (*reads, *written))
        return out


def priced(tensor, codec, params):
    """(ms to encode, ms to decode, the same without launches) at 1 byte a nanosecond, as a planner expects them."""
    meta = dataclasses.replace(meta_of(tensor), device="cuda")
    device = Device(kind="cuda", name="", copy_bytes_per_s=1e9)
    return codec_costs_ms(CODECS[codec], meta, device, 1.0, str(params.get("test")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params", [q for q in QUESTIONS if q["test"] != "mask"], ids=lambda params: params["test"]
)
def test_a_plan_expects_what_the_kernels_of_a_predicate_read_and_write(params, dtype, monkeypatch):
    tensor = torch.empty(1 << 21, device="meta", dtype=dtype)
    answers = codec_predicate.Answers(1.0, 0.0, torch.empty((), device="meta", dtype=dtype))
    monkeypatch.setattr(codec_predicate, "_yes_and_no", lambda *_: answers)
    with Traffic() as encoding:
        encoded = codec_predicate.encode(tensor, params)
    with Traffic() as decoding:
        codec_predicate.decode(encoded)
    agree(tensor, "predicate", params, encoding, decoding)


def test_a_plan_expects_what_the_kernels_of_pool_indices_read_and_write():
    params = {"self.size": [8, 3, 512, 512], "kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1]}
    indices = torch.empty(8, 3, 256, 256, device="meta", dtype=torch.int64)
    with Traffic() as encoding:
        encoded = codec_pool_index.encode(indices, params)
    with Traffic() as decoding:
        codec_pool_index.decode(encoded)
    agree(indices, "pool_index", params, encoding, decoding)


def agree(tensor, codec, params, encoding, decoding):
    """A copy reads and writes each byte, so at a copy rate of 1 byte a ns a byte of traffic takes half a ns."""
    expected = priced(tensor, codec, params)
    pieces = CODECS[codec].pieces(dataclasses.replace(meta_of(tensor), device="cuda"))
    passes = CODECS[codec].passes["cuda"]
    launched = (passes.encode_launches, passes.decode_launches)
    for ms, traffic, launches in zip(expected, (encoding, decoding), launched, strict=True):
        assert traffic.bytes / 2e6 == pytest.approx(ms, rel=0.3)
        assert traffic.kernels <= 1.3 * launches * pieces
        assert traffic.kernels > 0.4 * launches * pieces
