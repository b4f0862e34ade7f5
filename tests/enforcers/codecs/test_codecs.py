"""Every row of `slot_needs.SLOT_NEEDS` against the real backward, and every codec against its own inverse, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import profile

from memopt.codecs.meta import CHUNK_CELLS, bitmap_bytes, whole_storage
from memopt.codecs.table import CODECS
from memopt.enforcers.codecs import bits, premises
from memopt.enforcers.codecs.encoded import bits_of, cells_of, flat_storage, is_plain, meta_of
from memopt.enforcers.codecs.premises import Call, TensorFacts
from memopt.enforcers.codecs.table import bytes_beyond, decode, encode, encode_for
from memopt.estimators.simulator.slot_needs import (
    SLOT_NEEDS,
    VALUES,
    Need,
    needs_of,
    weakest_common_codec,
)
from memopt.instrument.nodes import attributes_of
from memopt.plan import SlotRef
from memopt.value_facts import ValueFacts

NAN, INF = math.nan, math.inf
AWKWARD = (NAN, INF, -INF, -0.0, 0.0, 1.0, -1.0, 6.0, 3.0, -3.0, 0.1, 0.5, -0.5, 1e-40, 3e38, -NAN)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.size() == right.size()
        and left.stride() == right.stride()
        and torch.equal(bits_of(left.contiguous()), bits_of(right.contiguous()))
    )


# ------------------------------------------------------------------ the table against the real backward


@dataclass(frozen=True)
class Case:
    """`make(data)` gives inputs, `call` runs the operation; `slots` are those that must not need their values."""

    name: str
    call: Callable[..., torch.Tensor]
    inputs: tuple[object, ...]
    slots: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    not_as: tuple[str, ...] = ()
    """Kinds of data with which torch itself refuses the operation or its backward."""


@dataclass(frozen=True)
class Floats:
    size: tuple[int, ...]
    trained: bool = True
    positive: bool = False


@dataclass(frozen=True)
class Ints:
    below: int
    size: tuple[int, ...]


@dataclass(frozen=True)
class Bools:
    size: tuple[int, ...]


IMAGE = Floats((2, 5, 13, 11))
VOLUME = Floats((2, 3, 7, 6, 9))
FROZEN = {"trained": False}


def conv(x, w, b):
    return F.conv2d(x, w, b, stride=2, padding=1)


def grid_of(x, g):
    return F.grid_sample(x, g * 0.5, align_corners=False)


ELEMENTWISE = [
    Case("relu", F.relu, (IMAGE,), ("ReluBackward0.result",)),
    Case("relu_", lambda x: F.relu_(x * 1.5), (IMAGE,), ("ReluBackward0.result",)),
    Case("threshold", lambda x: F.threshold(x, 0.1, 0.2), (IMAGE,), ("ThresholdBackward0.self",)),
    Case("threshold_", lambda x: F.threshold_(x * 1.5, 0.1, 7.0), (IMAGE,), ("ThresholdBackward1.self",)),
    Case("leaky_relu", F.leaky_relu, (IMAGE,), ("LeakyReluBackward0.self",)),
    Case("leaky_relu -1", lambda x: F.leaky_relu(x, -1.0), (IMAGE,), ("LeakyReluBackward0.self",)),
    Case("leaky_relu 0", lambda x: F.leaky_relu(x, 0.0), (IMAGE,), ("LeakyReluBackward0.self",)),
    Case("leaky_relu_", lambda x: F.leaky_relu_(x * 1.5, 0.2), (IMAGE,), ("LeakyReluBackward1.result",)),
    Case("hardtanh", F.hardtanh, (IMAGE,), ("HardtanhBackward0.self",)),
    Case("hardtanh .1", lambda x: F.hardtanh(x, 0.1, 0.3), (IMAGE,), ("HardtanhBackward0.self",)),
    Case("hardtanh_", lambda x: F.hardtanh_(x * 1.5), (IMAGE,), ("HardtanhBackward0.self",)),
    Case("relu6", lambda x: F.relu6(x * 4), (IMAGE,), ("HardtanhBackward0.self",)),
    Case("hardsigmoid", lambda x: F.hardsigmoid(x * 3), (IMAGE,), ("HardsigmoidBackward0.self",)),
    Case("hardshrink", F.hardshrink, (IMAGE,), ("HardshrinkBackward0.self",)),
    Case("softshrink", F.softshrink, (IMAGE,), ("SoftshrinkBackward0.self",)),
    Case("clamp", lambda x: x.clamp(-1, 1), (IMAGE,), ("ClampBackward1.self",)),
    Case("clamp .1", lambda x: x.clamp(-0.1, 0.1), (IMAGE,), ("ClampBackward1.self",)),
    Case("clamp min=", lambda x: x.clamp(min=0.1), (IMAGE,), ("ClampBackward1.self",)),
    Case("clamp max=", lambda x: x.clamp(max=0.1), (IMAGE,), ("ClampBackward1.self",)),
    Case("clamp_", lambda x: (x * 1.5).clamp_(-1, 1), (IMAGE,), ("ClampBackward1.self",)),
    Case("clamp_min", lambda x: x.clamp_min(0), (IMAGE,), ("ClampMinBackward0.self",)),
    Case("clamp_max", lambda x: x.clamp_max(0.3), (IMAGE,), ("ClampMaxBackward0.self",)),
    Case(
        "masked_fill",
        lambda x, m: x.masked_fill(m, -1e9),
        (IMAGE, Bools((2, 5, 13, 11))),
        ("MaskedFillBackward0.mask",),
    ),
    Case(
        "masked_fill broadcast",
        lambda x, m: x.masked_fill(m, 0),
        (IMAGE, Bools((13, 11))),
        ("MaskedFillBackward0.mask",),
    ),
    Case(
        "masked_fill tensor",
        lambda x, m, v: x.masked_fill(m, v),
        (IMAGE, Bools((2, 5, 13, 11)), Floats(())),
        ("MaskedFillBackward1.mask",),
    ),
    Case(
        "where",
        lambda c, x, y: torch.where(c, x, y),
        (Bools((2, 5, 13, 11)), IMAGE, IMAGE),
        ("WhereBackward0.condition",),
    ),
    Case(
        "masked_select",
        lambda x, m: x.masked_select(m),
        (Floats((6, 7)), Bools((6, 7))),
        ("MaskedSelectBackward0.mask", "MaskedSelectBackward0.self"),
    ),
    Case(
        "masked_scatter",
        lambda x, m, y: x.masked_scatter(m, y),
        (Floats((6, 7)), Bools((6, 7)), Floats((6, 7))),
        ("MaskedScatterBackward0.mask",),
    ),
    Case(
        "native_dropout",
        lambda x: torch.native_dropout(x, 0.3, True)[0],
        (IMAGE,),
        ("NativeDropoutBackward0.result1",),
    ),
]

MAX2 = ("MaxPool2DWithIndicesBackward0.self", "MaxPool2DWithIndicesBackward0.result1")
MAX3 = ("MaxPool3DWithIndicesBackward0.self", "MaxPool3DWithIndicesBackward0.result1")
POOLING = [
    Case("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), (Floats((2, 4, 13)),), MAX2),
    Case("max_pool2d 2", lambda x: F.max_pool2d(x, 2), (IMAGE,), MAX2),
    Case("max_pool2d 3 2 1", lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,), MAX2),
    Case(
        "max_pool2d uneven",
        lambda x: F.max_pool2d(x, (3, 2), (1, 2), (1, 0), (2, 1), ceil_mode=True),
        (IMAGE,),
        MAX2,
    ),
    Case("max_pool2d 5 ceil", lambda x: F.max_pool2d(x, 5, 3, 2, ceil_mode=True), (IMAGE,), MAX2),
    Case("max_pool2d unbatched", lambda x: F.max_pool2d(x, 2), (Floats((5, 13, 11)),), MAX2),
    Case("max_pool3d", lambda x: F.max_pool3d(x, 2), (VOLUME,), MAX3),
    Case(
        "max_pool3d uneven",
        lambda x: F.max_pool3d(x, (3, 2, 3), (2, 1, 2), (1, 0, 1), ceil_mode=True),
        (VOLUME,),
        MAX3,
    ),
    Case(
        "adaptive_max_pool1d",
        lambda x: F.adaptive_max_pool1d(x, 3),
        (Floats((2, 4, 9)),),
        ("AdaptiveMaxPool2DBackward0.self",),
    ),
    Case(
        "adaptive_max_pool2d",
        lambda x: F.adaptive_max_pool2d(x, 4),
        (IMAGE,),
        ("AdaptiveMaxPool2DBackward0.self",),
    ),
    Case(
        "adaptive_max_pool3d",
        lambda x: F.adaptive_max_pool3d(x, 3),
        (VOLUME,),
        ("AdaptiveMaxPool3DBackward0.self",),
    ),
    Case(
        "fractional_max_pool2d",
        lambda x: F.fractional_max_pool2d(x, 2, output_size=4),
        (IMAGE,),
        ("FractionalMaxPool2DBackward0.self",),
    ),
    Case(
        "fractional_max_pool3d",
        lambda x: F.fractional_max_pool3d(x, 2, output_size=3),
        (VOLUME,),
        ("FractionalMaxPool3DBackward0.self",),
    ),
    Case("avg_pool1d", lambda x: F.avg_pool1d(x, 3), (Floats((2, 4, 9)),), ("AvgPool2DBackward0.self",)),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), (IMAGE,), ("AvgPool2DBackward0.self",)),
    Case(
        "avg_pool3d", lambda x: F.avg_pool3d(x, 2), (VOLUME,), ("AvgPool3DBackward0.self",), (torch.float32,)
    ),
    Case(
        "adaptive_avg_pool2d",
        lambda x: F.adaptive_avg_pool2d(x, 4),
        (IMAGE,),
        ("AdaptiveAvgPool2DBackward0.self",),
    ),
    Case(
        "adaptive_avg_pool3d",
        lambda x: F.adaptive_avg_pool3d(x, 3),
        (VOLUME,),
        ("AdaptiveAvgPool3DBackward0.self",),
    ),
]


def pad(count: int, mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.pad(x, (1, 2) * count, mode=mode)


SHAPES = [
    *(
        Case(f"pad {mode} {n}d", pad(n, mode), (size,), (f"{node}Pad{n}DBackward0.self",))
        for mode, node in (("reflect", "Reflection"), ("replicate", "Replication"))
        for n, size in ((1, Floats((2, 4, 9))), (2, IMAGE), (3, VOLUME))
    ),
    Case("nll_loss", F.nll_loss, (Floats((33, 5)), Ints(5, (33,))), ("NllLossBackward0.self",)),
    Case(
        "nll_loss sum",
        lambda x, t: F.nll_loss(x, t, reduction="none"),
        (Floats((33, 5)), Ints(5, (33,))),
        ("NllLossBackward0.self",),
    ),
    Case(
        "nll_loss2d",
        F.nll_loss,
        (Floats((2, 5, 7, 3)), Ints(5, (2, 7, 3))),
        ("NllLoss2DBackward0.self",),
        not_as=("channels_last", "gaps"),
    ),
    Case("gather", lambda x, i: x.gather(1, i), (Floats((6, 7)), Ints(7, (6, 3))), ("GatherBackward0.self",)),
    Case("take", torch.take, (Floats((6, 7)), Ints(42, (5,))), ("TakeBackward0.self",)),
    Case("cummax", lambda x: x.cummax(1)[0], (IMAGE,), ("CummaxBackward0.self",)),
    Case("cummin", lambda x: x.cummin(1)[0], (IMAGE,), ("CumminBackward0.self",)),
    Case(
        "index_add",
        lambda x, i, s: x.index_add(0, i, s),
        (Floats((6, 7)), Ints(6, (3,)), Floats((3, 7))),
        ("IndexAddBackward0.source",),
    ),
    Case(
        "index_copy",
        lambda x, s: x.index_copy(0, torch.tensor([4, 0, 2]), s),
        (Floats((6, 7)), Floats((3, 7))),
        ("IndexCopyBackward0.source",),
    ),
]

WEIGHT, BIAS = (6, 5, 3, 3), (6,)
FROZEN_LAYERS = [
    Case(
        "conv2d frozen",
        conv,
        (IMAGE, Floats(WEIGHT, **FROZEN), Floats(BIAS, **FROZEN)),
        ("ConvolutionBackward0.input",),
    ),
    Case(
        "conv2d frozen, bias trained",
        conv,
        (IMAGE, Floats(WEIGHT, **FROZEN), Floats(BIAS)),
        ("ConvolutionBackward0.input",),
    ),
    Case("conv2d no bias", F.conv2d, (IMAGE, Floats(WEIGHT, **FROZEN)), ("ConvolutionBackward0.input",)),
    Case(
        "conv2d grouped",
        lambda x, w: F.conv2d(x, w, groups=5),
        (IMAGE, Floats((5, 1, 3, 3), **FROZEN)),
        ("ConvolutionBackward0.input",),
    ),
    Case(
        "conv1d", F.conv1d, (Floats((2, 4, 9)), Floats((5, 4, 3), **FROZEN)), ("ConvolutionBackward0.input",)
    ),
    Case(
        "conv1d bias",
        F.conv1d,
        (Floats((2, 4, 9)), Floats((5, 4, 3), **FROZEN), Floats((5,))),
        ("ConvolutionBackward0.input",),
    ),
    Case("conv3d", F.conv3d, (VOLUME, Floats((2, 3, 3, 3, 3), **FROZEN)), ("ConvolutionBackward0.input",)),
    Case(
        "conv3d bias",
        F.conv3d,
        (VOLUME, Floats((2, 3, 3, 3, 3), **FROZEN), Floats((2,))),
        ("ConvolutionBackward0.input",),
    ),
    Case(
        "conv_transpose2d",
        F.conv_transpose2d,
        (IMAGE, Floats((5, 3, 3, 3), **FROZEN)),
        ("ConvolutionBackward0.input",),
    ),
    Case(
        "conv_transpose2d bias",
        F.conv_transpose2d,
        (IMAGE, Floats((5, 3, 3, 3), **FROZEN), Floats((3,))),
        ("ConvolutionBackward0.input",),
    ),
    Case(
        "batch_norm eval frozen",
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, False),
        (
            IMAGE,
            Floats((5,), **FROZEN),
            Floats((5,), trained=False, positive=True),
            Floats((5,), **FROZEN),
            Floats((5,), **FROZEN),
        ),
        ("NativeBatchNormBackward0.input",),
    ),
    Case(
        "batch_norm eval plain",
        lambda x, m, v: F.batch_norm(x, m, v, None, None, False),
        (IMAGE, Floats((5,), **FROZEN), Floats((5,), trained=False, positive=True)),
        ("NativeBatchNormBackward0.input",),
    ),
    Case(
        "grid_sample 2d",
        grid_of,
        (IMAGE, Floats((2, 4, 4, 2), **FROZEN)),
        ("GridSampler2DBackward0.input",),
        (torch.float32,),
    ),
    Case(
        "grid_sample 3d",
        grid_of,
        (VOLUME, Floats((2, 4, 4, 4, 3), **FROZEN)),
        ("GridSampler3DBackward0.input",),
        (torch.float32,),
    ),
]
CASES = ELEMENTWISE + POOLING + SHAPES + FROZEN_LAYERS


def make(spec: object, dtype: torch.dtype, data: str) -> torch.Tensor:
    if isinstance(spec, Ints):
        return torch.randint(0, spec.below, spec.size)
    if isinstance(spec, Bools):
        return torch.rand(spec.size) > 0.5
    assert isinstance(spec, Floats)
    x = torch.randn(spec.size)
    if spec.positive:
        x = x.abs() + 0.1
    elif data == "awkward" and x.numel() > len(AWKWARD):
        places = torch.randperm(x.numel())[: x.numel() // 3]
        x.view(-1)[places] = torch.tensor(AWKWARD)[torch.randint(0, len(AWKWARD), places.shape)]
    elif data == "bounds":
        x = torch.tensor([0.0, 1.0, -1.0, 0.1, -0.1, 0.3, 6.0, 3.0, -3.0, 0.5, -0.5])[
            torch.randint(0, 11, spec.size)
        ]
    x = x.to(dtype)
    if data == "channels_last" and x.dim() >= 4:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    elif data == "gaps" and x.dim() >= 2:
        x = torch.stack((x, x), -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
    return x.detach().requires_grad_(spec.trained)


class Handle:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.reader: tuple[str, Need] | None = None


class Run:
    """One forward and backward of a case; `lesser` replaces every slot that can do with less than its values."""

    def __init__(
        self, case: Case, dtype: torch.dtype, data: str, *, needs: list[tuple[str, Need]] | None = None
    ) -> None:
        torch.manual_seed(11)
        inputs = [make(spec, dtype, data) for spec in case.inputs]
        self.handles: list[Handle] = []
        self.read: list[Handle] = []
        self.needs, self.encoded = needs, 0
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            out = case.call(*inputs)
        if needs is None:
            self.slots = self._name_slots(out)
        torch.manual_seed(12)
        upstream = torch.randn(out.shape).to(out.dtype)
        if data == "awkward" and case in ELEMENTWISE and upstream.dim():
            upstream.view(-1)[::5] = torch.tensor(AWKWARD)[
                torch.randint(0, len(AWKWARD), upstream.view(-1)[::5].shape)
            ].to(out.dtype)
        self.grads = torch.autograd.grad(out, [x for x in inputs if x.requires_grad], upstream)

    def _pack(self, tensor: torch.Tensor) -> Handle:
        self.handles.append(Handle(tensor))
        if self.needs is not None:
            self.handles[-1].reader = self.needs[len(self.handles) - 1]
        return self.handles[-1]

    def _unpack(self, handle: Handle) -> torch.Tensor:
        self.read.append(handle)
        if self.needs is None or handle.reader is None or handle.reader[1] == VALUES:
            return handle.tensor
        encoded = encode_for(handle.reader[1], handle.tensor)
        if encoded is None:
            return handle.tensor
        self.encoded += 1
        given = decode(encoded)
        assert given.size() == handle.tensor.size()
        assert given.stride() == handle.tensor.stride()
        assert given.dtype == handle.tensor.dtype
        assert given.storage_offset() == handle.tensor.storage_offset()
        return given

    def _name_slots(self, out: torch.Tensor) -> list[tuple[str, Need]]:
        todo, seen = [out.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            attributes = attributes_of(node) | sizes_of(node)
            for attribute in dir(node):
                self.read.clear()
                if attribute.startswith("_saved_"):
                    getattr(node, attribute)
                for handle in self.read:
                    slot = attribute.removeprefix("_saved_")
                    handle.reader = (f"{node.name()}.{slot}", needs_of(node.name(), slot, attributes))
        return [handle.reader or ("?", VALUES) for handle in self.handles]


def sizes_of(node) -> dict[str, object]:
    """Of the tensors that `node` saved, as a profile has them from its slots."""
    saved = {
        name.removeprefix("_saved_"): getattr(node, name) for name in dir(node) if name.startswith("_saved_")
    }
    return {f"{slot}.size": tuple(t.size()) for slot, t in saved.items() if isinstance(t, torch.Tensor)}


DATA = ("plain", "awkward", "bounds", "channels_last", "gaps")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients_are_bit_identical_with_the_lesser_thing(case):
    for dtype in case.dtypes:
        for data in (kind for kind in DATA if kind not in case.not_as):
            plain = Run(case, dtype, data)
            lesser = [slot for slot, need in plain.slots if need != VALUES]
            assert set(case.slots) <= set(lesser), plain.slots
            less = Run(case, dtype, data, needs=plain.slots)
            assert len(plain.grads) == len(less.grads)
            for left, right in zip(plain.grads, less.grads, strict=True):
                assert same_bits(left, right), (dtype, data)
            if data != "awkward":  # with NaN some predicates are declined, and are then kept
                assert less.encoded >= len(lesser), (dtype, data, plain.slots)


@pytest.mark.parametrize(
    "wrong", [Need("nothing", (("stand_in", "real"),)), Need("predicate", (("test", "clamp"), ("min", 0.5)))]
)
def test_a_wrong_claim_would_be_seen(wrong):
    case = Case("relu", F.relu, (IMAGE,), ())
    assert not same_bits(
        Run(case, torch.float32, "plain").grads[0],
        Run(case, torch.float32, "plain", needs=[("", wrong)]).grads[0],
    )


def test_every_row_of_the_table_has_a_case():
    proven = {slot for case in CASES for slot in case.slots}
    assert proven == set(SLOT_NEEDS)


def test_the_attributes_a_row_takes_exist_on_the_node():
    for case in CASES:
        for slot, need in Run(case, torch.float32, "plain").slots:
            for row in SLOT_NEEDS.get(slot, ())[:1]:
                assert {name for name, _ in need.params} == {name for name, _ in row.fixed} | set(row.takes)


def test_a_trained_weight_keeps_the_convolutions_input():
    case = Case("conv", conv, (IMAGE, Floats(WEIGHT), Floats(BIAS)), ())
    assert dict(Run(case, torch.float32, "plain").slots)["ConvolutionBackward0.input"] == VALUES


def test_batch_norm_in_training_or_with_a_trained_weight_keeps_its_input():
    frozen = {"training": False, "needs_input_grad": (True, False, False)}
    assert needs_of("NativeBatchNormBackward0", "input", frozen).kind == "nothing"
    assert needs_of("NativeBatchNormBackward0", "input", frozen | {"training": True}) == VALUES
    assert (
        needs_of("NativeBatchNormBackward0", "input", frozen | {"needs_input_grad": (True, True, True)})
        == VALUES
    )
    assert needs_of("NativeBatchNormBackward0", "input", {"training": False}) == VALUES


def test_unknown_slots_and_missing_attributes_need_values():
    assert needs_of("GeluBackward0", "self", {}) == VALUES
    assert needs_of("NoSuchBackward0", "x", {}) == VALUES
    assert needs_of("HardtanhBackward0", "self", {"min_val": -1.0}) == VALUES
    assert needs_of("MaxPool2DWithIndicesBackward0", "result1", {"kernel_size": (2, 2)}) == VALUES


def test_the_weakest_common_codec_lets_every_reader_go():
    nothing, relu = Need("nothing"), Need("predicate", (("test", "relu"),))
    assert weakest_common_codec([nothing, nothing]) == "nothing"
    assert weakest_common_codec([relu, nothing]) == "predicate"
    assert weakest_common_codec([Need("pool_index"), nothing]) == "pool_index"
    assert weakest_common_codec([relu, VALUES]) is None
    assert weakest_common_codec([relu, VALUES], ["zero_bitmap"]) == "zero_bitmap"
    assert weakest_common_codec([relu, Need("pool_index")], ["zero_bitmap"]) == "zero_bitmap"
    assert weakest_common_codec([], ["zero_bitmap"]) is None


def test_a_need_survives_json():
    need = needs_of("ClampBackward1", "self", {"min": None, "max": 0.5})
    again = Need(
        need.kind,
        tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in json.loads(json.dumps(need.params))),
    )
    assert again == need


# ------------------------------------------------------------------ each codec against its own inverse


def stored_again(codec: str, tensor: torch.Tensor, **params: object) -> torch.Tensor | None:
    """decode(encode(x)), with what every codec promises about sizes checked on the way."""
    before = bits_of(cells_of(tensor)).clone()
    encoded = encode(codec, tensor, params)
    assert torch.equal(bits_of(cells_of(tensor)), before), "encode changed its input"
    if encoded is None:
        return None
    meta = meta_of(tensor)
    assert encoded.encoded_bytes == CODECS[codec].held_bytes(meta, {**params, **encoded.params})
    first, second = decode(encoded), decode(encoded)
    for again in (first, second):
        assert meta_of(again) == meta
        assert again.untyped_storage().nbytes() == CODECS[codec].decoded_bytes(meta, params)
    if codec != "nothing":
        assert torch.equal(bits_of(cells_of(first)), bits_of(cells_of(second)))
    return first


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "offset": lambda x: x[1:],
    "gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(6, *x.shape[1:]),
    "channels_last": lambda x: x.view(4, 3, 5, 7).contiguous(memory_format=torch.channels_last),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0],
    "one": lambda x: x[1:2, 1:2],
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def exact(codec: str, tensor: torch.Tensor) -> bool:
    """Whether the codec took the tensor; then every bit came back."""
    given = stored_again(codec, tensor)
    if given is None:
        return False
    assert torch.equal(bits_of(given.contiguous()), bits_of(tensor.contiguous()))
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_value_codecs_return_every_bit_of_every_layout(layout, dtype):
    torch.manual_seed(1)
    dense = torch.randn(12, 35, dtype=torch.float64)
    sparse = torch.relu(dense) * (torch.rand_like(dense) > 0.6)
    sparse.view(-1)[::7] = torch.tensor(AWKWARD, dtype=torch.float64)[torch.arange(60) % len(AWKWARD)]
    two = torch.where(dense > 0, 1.7, 0.0)
    arrange = LAYOUTS[layout]
    for codec in ("zero_bitmap", "two_valued", "exact_cast"):
        for source in (dense, sparse, two, torch.zeros_like(dense)):
            exact(codec, arrange(source.to(dtype)))
    if layout != "empty":
        assert exact("two_valued", arrange(two.to(dtype)))
        assert exact("two_valued", arrange(torch.full_like(two, NAN).to(dtype)))
    if layout in ("contiguous", "transposed", "offset", "gaps", "channels_last"):
        assert exact("zero_bitmap", arrange(sparse.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int32, torch.bool, torch.uint8])
def test_value_codecs_on_other_dtypes_are_exact_or_decline(dtype):
    x = (torch.randn(50, 7) > 0.8).to(dtype)
    for codec in ("zero_bitmap", "two_valued", "exact_cast", "narrow_int"):
        exact(codec, x)
    if dtype.itemsize <= 8:
        assert exact("two_valued", x)


def test_dense_data_are_declined():
    x = torch.randn(4096)
    assert encode("zero_bitmap", x) is None
    assert encode("two_valued", x) is None
    assert encode("exact_cast", x) is None


def test_negative_zero_is_not_zero():
    x = torch.zeros(4096)
    x[::2] = -0.0
    given = stored_again("two_valued", x)
    assert given is not None
    assert torch.equal(torch.signbit(given), torch.signbit(x))
    assert encode("zero_bitmap", x) is not None
    assert torch.equal(torch.signbit(decode(encode("zero_bitmap", x))), torch.signbit(x))


def test_a_third_value_in_the_last_chunk_is_noticed():
    x = torch.zeros(CHUNK_CELLS * 2 + 5)
    x[7] = 2.0
    assert exact("two_valued", x)
    x[-1] = 3.0
    assert encode("two_valued", x) is None


def test_chunks_meet_without_a_seam():
    torch.manual_seed(2)
    n = CHUNK_CELLS * 2 + 11
    x = torch.relu(torch.randn(n))
    assert exact("zero_bitmap", x)
    assert exact("exact_cast", x.bfloat16().float())
    relu = stored_again("predicate", x, test="relu")
    assert relu is not None
    assert torch.equal(relu > 0, x > 0)


@pytest.mark.parametrize(
    ("dtype", "half"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float64, torch.float32)],
)
def test_an_upcast_is_halved_and_anything_else_is_not(dtype, half):
    x = torch.randn(999).to(half).to(dtype)
    x[:4] = torch.tensor([NAN, INF, -INF, -0.0], dtype=dtype)
    encoded = encode("exact_cast", x)
    assert encoded is not None
    assert encoded.encoded_bytes == 999 * half.itemsize
    assert exact("exact_cast", x)
    x[-1] = 1 + torch.finfo(dtype).eps
    assert encode("exact_cast", x) is None


@pytest.mark.parametrize(
    ("low", "high", "held"),
    [
        (0, 255, 1),
        (-1, 255, 2),
        (-32768, 32767, 2),
        (0, 32768, 4),
        (-(2**31), 2**31 - 1, 4),
        (0, 2**31, None),
        (-(2**63), 2**63 - 1, None),
    ],
)
def test_integers_are_held_in_the_narrowest_type(low, high, held):
    x = torch.tensor([low, high, low])
    encoded = encode("narrow_int", x)
    assert (encoded and encoded.encoded_bytes) == (held and 3 * held)
    assert exact("narrow_int", x) == (held is not None)


def test_narrow_integers_of_every_layout():
    x = torch.arange(420).view(12, 35)
    for arrange in LAYOUTS.values():
        assert exact("narrow_int", arrange(x))
    assert encode("narrow_int", x.to(torch.uint8)) is None
    assert encode("narrow_int", x.float()) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_predicate_answers_as_the_original(layout, dtype):
    x = LAYOUTS[layout](torch.randn(12, 35).to(dtype))
    given = stored_again("predicate", x, test="relu")
    assert given is not None
    assert torch.equal(given <= 0, x <= 0)
    given = stored_again("predicate", x, test="clamp", min=-0.1, max=0.1)
    assert given is not None
    assert torch.equal(_passed_by_clamp(given), _passed_by_clamp(x))


def _passed_by_clamp(x, low=-0.1, high=0.1):
    """Where `clamp` passes a gradient: at its bounds up to torch 2.13, and not from 2.14 on."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(x.clamp(low, high), x, torch.ones_like(x))[0].bool()


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-1.0, None), (None, 1.0), (0.5, 0.5)])
def test_values_at_the_bounds_of_clamp_are_answered_as_this_torch_does(low, high):
    x = torch.tensor([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0])
    bounds = {name: bound for name, bound in (("min", low), ("max", high)) if bound is not None}
    given = stored_again("predicate", x, test="clamp", **bounds)
    if given is not None:
        assert torch.equal(_passed_by_clamp(given, low, high), _passed_by_clamp(x, low, high))


def test_with_a_torch_that_nobody_has_looked_at_backward_keeps_all_values(monkeypatch):
    call = Call("aten.relu.default", {"self": TensorFacts((4,), requires_grad=True)})
    ref = SlotRef(module="M#0", ordinal=0, node="ReluBackward0", slot="result", dtype="float32", dims=1, consumer=call.name, is_output=True, need="predicate", params={"test": "relu"})  # fmt: skip
    for version, holds in (
        ("2.13.0", True),
        ("2.14.1+cu130", True),
        ("2.15.0", False),
        ("2.15.0a0+git", False),
    ):
        premises._is_proven.cache_clear()
        monkeypatch.setattr(torch, "__version__", version)
        assert premises.hold(ref, call) is holds
    premises._is_proven.cache_clear()


def test_predicates_that_could_lose_something_are_declined():
    x = torch.randn(100)
    x[50] = NAN
    assert encode("predicate", x, {"test": "hardtanh", "min_val": -1, "max_val": 1}) is None
    assert encode("predicate", x, {"test": "relu"}) is not None
    assert encode("predicate", x, {"test": "no such"}) is None
    assert encode("predicate", x, {"test": "threshold"}) is None
    assert encode("predicate", x, {"test": "mask"}) is None
    assert encode("predicate", torch.randn(9), {"test": "hardtanh", "min_val": 0.0, "max_val": 0.0}) is None
    assert encode("predicate", torch.ones(4, dtype=torch.int64), {"test": "relu"}) is None
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    assert encode("predicate", odd, {"test": "mask"}) is None


@pytest.mark.parametrize("stand_in", ["empty", "real"])
def test_nothing_holds_nothing_and_keeps_the_shape(stand_in):
    for arrange in LAYOUTS.values():
        x = arrange(torch.randn(12, 35))
        encoded = encode("nothing", x, {"stand_in": stand_in})
        assert encoded is not None
        assert encoded.encoded_bytes == 0
        given = decode(encoded)
        assert meta_of(given) == meta_of(x)
        assert given.untyped_storage().nbytes() == CODECS["nothing"].decoded_bytes(
            meta_of(x), {"stand_in": stand_in}
        )


def test_foreign_pool_indices_are_declined():
    params = {"kernel_size": (2, 2), "self.size": (1, 1, 4, 4)}
    good = F.max_pool2d(torch.randn(1, 1, 4, 4), 2, return_indices=True)[1]
    assert encode("pool_index", good, params) is not None
    assert encode("pool_index", torch.zeros_like(good), params) is None
    assert encode("pool_index", good + 2**40, params) is None
    assert encode("pool_index", good - 100, params) is None
    assert encode("pool_index", good, {}) is None
    assert encode("pool_index", good, params | {"kernel_size": (20, 20)}) is None
    assert encode("pool_index", good.int(), params) is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pool_indices_of_any_window(data):
    rank = data.draw(st.sampled_from([2, 3]))
    kernel = tuple(data.draw(st.integers(1, 5)) for _ in range(rank))
    stride = tuple(data.draw(st.integers(1, 4)) for _ in range(rank))
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    dilation = tuple(data.draw(st.integers(1, 3)) for _ in range(rank))
    plane = tuple(
        max(1, (k - 1) * d + 1 - 2 * p) + data.draw(st.integers(0, 6))
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    pool = F.max_pool2d if rank == 2 else F.max_pool3d
    x = torch.randn(2, 3, *plane)
    if data.draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last if rank == 2 else torch.channels_last_3d)
    index = pool(x, kernel, stride, padding, dilation, data.draw(st.booleans()), True)[1]
    params = {
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "self.size": tuple(x.shape),
    }
    given = stored_again("pool_index", index, **params)
    if given is None:  # a window wholly in the padding gets an index that is none of its taps
        assert not all_inside(index, plane, kernel, stride, padding, dilation)
    else:
        assert torch.equal(given, index)


def all_inside(index, plane, kernel, stride, padding, dilation) -> bool:
    """Brute force: whether every index is a place of the plane that its window covers."""
    outputs = index.shape[-len(plane) :]
    for place in itertools.product(*map(range, outputs)):
        covered = set()
        for tap in itertools.product(*map(range, kernel)):
            at = [
                o * s - p + t * d for o, s, p, t, d in zip(place, stride, padding, tap, dilation, strict=True)
            ]
            if all(0 <= a < n for a, n in zip(at, plane, strict=True)):
                covered.add(sum(a * math.prod(plane[i + 1 :]) for i, a in enumerate(at)))
        if not set(index[(..., *place)].flatten().tolist()) <= covered:
            return False
    return True


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=70))
def test_bits_and_nibbles_come_back_on_both_paths(values):
    mask = torch.tensor(values, dtype=torch.bool)
    packed = torch.empty(bitmap_bytes(len(values)), dtype=torch.uint8)
    bits.pack_bits(mask, packed)
    assert torch.equal(bits.gather_bits(mask), packed)
    assert torch.equal(bits.unpack_bits(packed, len(values)), mask)
    assert torch.equal(bits.spread_bits(packed, len(values)), mask)
    nibbles = torch.tensor([v * 13 + i % 3 for i, v in enumerate(values)], dtype=torch.uint8)
    assert torch.equal(bits.unpack_nibbles(bits.pack_nibbles(nibbles), len(values)), nibbles)


@settings(max_examples=80, deadline=None)
@given(
    st.binary(max_size=400),
    st.sampled_from(["zero_bitmap", "two_valued", "exact_cast", "narrow_int"]),
    st.sampled_from(range(6)),
)
def test_any_bytes_come_back(raw, codec, kind):
    dtype = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8)[kind]
    usable = raw[: len(raw) // dtype.itemsize * dtype.itemsize]
    if usable:
        exact(codec, torch.frombuffer(bytearray(usable), dtype=torch.uint8).clone().view(dtype))


def test_tensors_that_are_not_plain_memory_are_declined():
    sparse = torch.eye(3).to_sparse()
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    meta = torch.empty(3, device="meta")

    class Own(torch.Tensor):
        pass

    own = torch.randn(3).as_subclass(Own)
    for odd in (sparse, conjugate, meta, own):
        assert not is_plain(odd)
        for codec in CODECS:
            assert encode(codec, odd, {"test": "relu", "stand_in": "empty"}) is None
    assert is_plain(torch.nn.Parameter(torch.randn(3)))

    def inside(x: torch.Tensor) -> torch.Tensor:
        assert encode("nothing", x) is None
        return x

    torch.vmap(inside)(torch.randn(2, 3))


def test_a_planned_room_is_taken_whole_and_passed_where_there_is_more() -> None:
    x = torch.zeros(1000)
    x[::4] = 1.5
    for planned, held in ((400, 400), (250, 250), (100, 250), (10**12, None)):
        encoded = encode("zero_bitmap", x, {"nonzero_cells": planned})
        assert (encoded and encoded.encoded_bytes) == (held and 125 + 4 * held)
        assert encoded is None or torch.equal(decode(encoded), x)
    beyond = bytes_beyond("zero_bitmap", x, {"nonzero_cells": 100}, encode("zero_bitmap", x, {}))
    assert beyond == 4 * 150
    assert bytes_beyond("zero_bitmap", x, {"nonzero_cells": 100}, None) == 4000 - 125 - 400


@pytest.mark.parametrize(
    ("planned", "high", "held"), [("int16", 9, 2), ("int16", 2**15, 4), ("uint8", 300, 2), ("gone", 9, 1), ("int32", 9, 4)]
)  # fmt: skip
def test_integers_are_held_in_the_planned_type_or_in_one_that_holds_them(planned, high, held) -> None:
    x = torch.tensor([0, high])
    encoded = encode("narrow_int", x, {"narrow_dtype": planned})
    assert encoded is not None
    assert encoded.encoded_bytes == 2 * held
    assert torch.equal(decode(encoded), x)


def test_plans_leave_a_margin_for_other_values() -> None:
    floats = whole_storage(4 << 20, "float32", "cpu")
    integers = whole_storage(8 << 20, "int64", "cpu")
    assert floats is not None
    assert integers is not None

    def found(**facts: object) -> ValueFacts:
        return ValueFacts(storage=0, dtype="", **facts)  # type: ignore[arg-type]

    sparse = CODECS["zero_bitmap"].planned
    assert sparse(found(nonzero_share=0.5), floats) == {"nonzero_cells": math.ceil((1 << 20) * 0.57)}
    assert sparse(found(nonzero_share=0.8), floats) is None
    narrow = CODECS["narrow_int"].planned
    assert narrow(found(low=0, high=127), integers) == {"narrow_dtype": "uint8"}
    assert narrow(found(low=0, high=128), integers) == {"narrow_dtype": "int16"}
    assert narrow(found(low=-1, high=9), integers) == {"narrow_dtype": "int16"}
    assert narrow(found(low=0, high=2**30), integers) is None
    cast = CODECS["exact_cast"].planned
    assert cast(found(exact_as="bfloat16"), floats) == {}
    assert cast(found(), floats) is None


def test_dropout_noise_is_two_valued_in_the_real_backward():
    for probability in (0.3, 0.5, 0.9):
        for dropout in (F.dropout, F.dropout2d, F.alpha_dropout):
            seen: list[torch.Tensor] = []

            def through_codec(tensor, seen=seen):
                encoded = encode("two_valued", flat_storage(tensor))
                assert encoded is not None
                seen.append(tensor)
                return decode(encoded).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

            def run(hooked, dropout=dropout, probability=probability, through_codec=through_codec):
                torch.manual_seed(3)
                x = torch.randn(4, 5, 6, 7, requires_grad=True)
                torch.manual_seed(4)
                if hooked:
                    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), through_codec):
                        out = dropout(x, probability, True)
                else:
                    out = dropout(x, probability, True)
                (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
                return grad

            assert same_bits(run(False), run(True))
            assert seen


def test_a_relu_net_through_zero_bitmaps_is_bit_identical():
    def run(hooked):
        torch.manual_seed(5)
        net = torch.nn.Sequential(
            torch.nn.Linear(40, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 3),
        )
        x = torch.randn(33, 40)

        def pack(tensor):
            return encode("zero_bitmap", tensor) or tensor.detach()

        def unpack(held):
            return held if isinstance(held, torch.Tensor) else decode(held)

        if hooked:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = F.cross_entropy(net(x), torch.arange(33) % 3)
        else:
            loss = F.cross_entropy(net(x), torch.arange(33) % 3)
        loss.backward()
        return [p.grad for p in net.parameters()]

    assert all(same_bits(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize(
    "codec", ["predicate", "zero_bitmap", "two_valued", "exact_cast", "narrow_int", "pool_index"]
)
def test_payloads_are_torch_memory_and_predicted_transients_hold(codec):
    """The allocator's own events: what remains is the payload, what was needed for a moment is what was predicted."""
    torch.manual_seed(6)
    source, params = _large(codec)
    meta = meta_of(source)
    events, encoded = _allocations(lambda: encode(codec, source, params))
    assert encoded is not None
    rounding = 64 * 8
    assert 0 <= sum(events) - encoded.encoded_bytes < rounding + 64
    spare = _highest(events) - encoded.encoded_bytes
    predicted = CODECS[codec].encode_bytes(meta, params)
    assert predicted - rounding <= spare <= predicted + rounding
    assert spare < 0.5 * meta.cells * meta.itemsize
    events, tensor = _allocations(lambda: decode(encoded))
    assert torch.equal(bits_of(tensor), bits_of(source)) or codec == "predicate"
    spare = _highest(events) - CODECS[codec].decoded_bytes(meta, params)
    predicted = CODECS[codec].decode_bytes(meta, params)
    assert predicted - rounding <= spare <= predicted + rounding
    assert spare < 0.5 * meta.cells * meta.itemsize


@pytest.mark.parametrize("cells", [CHUNK_CELLS, 2 * CHUNK_CELLS])
@pytest.mark.parametrize(
    "params",
    [{"test": "relu"}, {"test": "clamp", "min": 0.0, "max": 1.0}, {"test": "threshold", "threshold": 0.5}],
)
def test_answers_of_one_chunk_and_the_one_before(params, cells):
    source = torch.randn(cells)
    predicted = CODECS["predicate"].encode_bytes(meta_of(source), params)
    encode("predicate", source, params)  # what answers mean is found once
    events, encoded = _allocations(lambda: encode("predicate", source, params))
    assert predicted <= _highest(events) - encoded.encoded_bytes <= predicted + 64 * 8


def _large(codec: str) -> tuple[torch.Tensor, dict[str, object]]:
    x = torch.relu(torch.randn(40, 75, 32, 32))
    if codec == "predicate":
        return x, {"test": "hardtanh", "min_val": 0.1, "max_val": 2.0}
    if codec == "two_valued":
        return (x > 0).float(), {}
    if codec == "exact_cast":
        return x.bfloat16().float(), {}
    if codec == "narrow_int":
        return (x * 20).long(), {}
    if codec == "pool_index":
        return F.max_pool2d(x.repeat(1, 3, 1, 1), 2, return_indices=True)[1], {
            "kernel_size": (2, 2),
            "self.size": (40, 225, 32, 32),
        }
    return x, {}


def _allocations(act: Callable[[], object]) -> tuple[list[int], object]:
    """Bytes of every allocation (+) and release (-) in order, as torch's CPU allocator reports them."""
    with profile(profile_memory=True) as record:
        result = act()
    changes = [(e.start_ns(), e.nbytes()) for e in record.kineto_results.events() if e.name() == "[memory]"]
    return [change for _, change in sorted(changes, key=lambda pair: pair[0])], result


def _highest(events: list[int]) -> int:
    return max(itertools.accumulate(events), default=0)


def test_numpy_is_not_what_holds_the_payload():
    encoded = encode("predicate", torch.randn(1000), {"test": "relu"})
    assert encoded is not None
    assert encoded.payload[0].untyped_storage().resizable()
    assert not torch.from_numpy(np.zeros(3)).untyped_storage().resizable()


def test_every_need_is_what_a_codec_of_readers_holds() -> None:
    kinds = {row.kind for rows in SLOT_NEEDS.values() for row in rows}
    assert kinds == {name for name, codec in CODECS.items() if not codec.of_values}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_codec_has_its_sizes_and_its_words(codec: str, device: str) -> None:
    row = CODECS[codec]
    meta = dataclasses.replace(meta_of(torch.zeros(2, 3, 8, 8)), device=device)
    for size in (row.held_bytes, row.encode_bytes, row.decode_bytes, row.decoded_bytes):
        assert size(meta, {"kernel_size": (2, 2), "test": "relu"}) >= 0
    assert row.pieces(meta) == 1
    assert row.words
    assert row.effect
