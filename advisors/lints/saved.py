"""Lints about what a model saves: one function each, which yields the storages at stake."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from math import prod

from memopt.advisors.lints.registry import SavedSlot, Seen, lint

_SIXTEEN_BIT = ("bf16", "fp16")
_MASKS = {("WhereBackward0", "condition"), ("MaskedFillBackward0", "mask")}
_FACTORS = {("MulBackward0", "other"): 1, ("MulBackward0", "self"): 0}
"""Slot of a product -> the input of the node that it is."""
_IN_PLACE = ("relu", "leaky_relu", "elu", "hardswish", "hardtanh")


@lint(
    "logits-upcast",
    what="16-bit logits are copied to fp32 before the loss",
    try_="F.cross_entropy on the 16-bit logits (it accumulates in fp32), or a chunked loss",
)
def logits_upcast(seen: Seen) -> Iterable[int]:
    for op, name in enumerate(seen.names):
        if name == "_log_softmax":
            for storage in _and_what_they_copy(seen, seen.reads_of(op)):
                sources = seen.reads_of(seen.maker(storage)) if seen.made_by(storage) == "_to_copy" else []
                if seen.dtype(storage) == "fp32" and any(seen.dtype(s) in _SIXTEEN_BIT for s in sources):
                    yield storage


def _and_what_they_copy(seen: Seen, storages: list[int]) -> list[int]:
    """`storages`, and those that they are clones of: logits are often shifted before the loss."""
    copied = [
        source for s in storages if seen.made_by(s) == "clone" for source in seen.reads_of(seen.maker(s))
    ]
    return [*storages, *copied]


@lint(
    "attention-without-sdpa",
    what="attention weights of T x T are made and saved by hand",
    try_="torch.nn.functional.scaled_dot_product_attention",
)
def attention_by_hand(seen: Seen) -> Iterable[int]:
    for slot in seen.slots:
        square = slot.shape in seen.attention_shapes and slot.shape[-1] == slot.shape[-2]
        if slot.node == "SoftmaxBackward0" and square and slot.storage in seen.saved_storages:
            yield slot.storage


@lint(
    "materialised-mask",
    what="a mask is saved at the full size of what it masks",
    try_="a mask with dimensions of 1, which broadcasts",
)
def materialised_mask(seen: Seen) -> Iterable[int]:
    for slot in seen.slots:
        whole = int(seen.view.size[slot.storage]) >= prod(slot.shape)
        if whole and slot.storage in seen.saved_storages and _is_mask(seen, slot):
            yield slot.storage


def _is_mask(seen: Seen, slot: SavedSlot) -> bool:
    """Does it mask attention (T x S, or T x T by its shape alone), as bool or as factors that need no gradient?"""
    of_attention = slot.shape in seen.attention_shapes
    factor = _FACTORS.get((slot.node, slot.name))
    if factor is not None and slot.dtype != "bool":
        grads = seen.needs_grad(slot)
        constant = len(grads) > factor and not grads[factor]
        return of_attention and constant and not _is_noise(seen, slot.storage)
    square = len(slot.shape) >= 3 and slot.shape[-1] == slot.shape[-2] > 1
    masks = (slot.node, slot.name) in _MASKS or factor is not None
    return masks and slot.dtype == "bool" and (square or of_attention)


def _is_noise(seen: Seen, storage: int) -> bool:
    return any(seen.names[op] == "bernoulli_" for op in seen.writers(storage))


@lint(
    "dropout-noise-in-float",
    what="dropout keeps its noise as floating point numbers",
    try_="dropout out of place, whose mask is bool on a GPU; or memopt advise, which holds one bit an element",
)
def float_noise(seen: Seen) -> Iterable[int]:
    if seen.trace.device.kind == "cpu":
        return  # the kernel there has no other form
    for slot in seen.slots:
        factor = (slot.node, slot.name) in _FACTORS and slot.dtype != "bool"
        if factor and slot.storage in seen.saved_storages and _is_noise(seen, slot.storage):
            yield slot.storage


@lint(
    "out-of-place-at-the-peak",
    what="the peak is at an activation function that reads a tensor which nobody needs after it",
    try_="inplace=True, as in nn.ReLU(inplace=True)",
)
def out_of_place_at_the_peak(seen: Seen) -> Iterable[int]:
    if not seen.n:
        return
    peak = int(seen.view.high.argmax())
    if seen.phase(peak) == "forward" and seen.names[peak] in _IN_PLACE:
        for storage in seen.reads_of(peak):
            if seen.view.death[storage] == peak and storage not in seen.saved_storages:
                yield storage


@lint(
    "frozen-layer-saves-its-input",
    what="convolutions with frozen weights save inputs that their backward never reads",
    try_="memopt advise, which drops them; or run the frozen part under torch.no_grad()",
)
def frozen_convolution(seen: Seen) -> Iterable[int]:
    for slot in seen.slots:
        grads = seen.needs_grad(slot)
        frozen = len(grads) > 1 and grads[1] is False
        if (
            slot.node == "ConvolutionBackward0"
            and slot.name == "input"
            and frozen
            and slot.storage in seen.saved_storages
        ):
            yield slot.storage


@lint(
    "autocast-weight-copies",
    what="16-bit copies of parameters are saved for backward beside the parameters",
    try_="memopt advise, which holds none of them; or parameters in bf16",
)
def weight_copies(seen: Seen) -> Iterable[int]:
    for copies in _casts(seen).values():
        yield from copies


@lint(
    "weights-cast-again-and-again",
    what="the same parameters are cast to 16 bit several times in one iteration, and the copies are saved",
    try_="one autocast region around all of forward, with its cache enabled",
)
def repeated_casts(seen: Seen) -> Iterable[int]:
    for copies in _casts(seen).values():
        for earlier, later in pairwise(copies):
            if seen.view.death[earlier] >= seen.maker(later):
                yield later


def _casts(seen: Seen) -> dict[int, list[int]]:
    """Parameter -> the saved 16-bit copies of it, in the order in which they were made."""
    found: dict[int, list[int]] = defaultdict(list)
    for storage in sorted(seen.saved_storages, key=seen.maker):
        if seen.made_by(storage) == "_to_copy" and seen.dtype(storage) in _SIXTEEN_BIT:
            for source in seen.reads_of(seen.maker(storage)):
                if seen.category(source) == "parameter":
                    found[source].append(storage)
    return found


@lint(
    "int64-where-less-serves",
    what="64-bit integers are saved where 32 or 8 bits would do",
    try_="indices as int32, masks as bool, classes instead of one-hot",
)
def wide_integers(seen: Seen) -> Iterable[int]:
    for slot in seen.slots:
        if slot.dtype == "int64" and slot.storage in seen.saved_storages and "Pool" not in slot.node:
            yield slot.storage


@lint(
    "float64",
    what="activations in double precision are saved",
    try_=".float(), or a float32 constant where float64 comes in",
)
def doubles(seen: Seen) -> Iterable[int]:
    for slot in seen.slots:
        if slot.dtype == "float64" and slot.storage in seen.saved_storages:
            yield slot.storage


@lint(
    "saved-twice",
    what="a copy of a tensor is saved beside the tensor itself",
    try_="leave out .clone() or .contiguous(), or use the copy from then on",
)
def saved_twice(seen: Seen) -> Iterable[int]:
    for storage in seen.saved_storages:
        if seen.made_by(storage) != "clone":
            continue
        for value in seen.view.reads[seen.maker(storage)]:
            saved = seen.view.saved.get(seen.view.value_storage[value])
            if saved is None or saved.first_use >= seen.n or saved.value != value:
                continue
            if seen.layouts(saved.storage) & seen.layouts(storage):
                yield storage


@lint(
    "norm-by-hand",
    what="an RMS or layer norm is composed of pow, mean, rsqrt and mul, each of which saves an activation",
    try_="torch.nn.functional.rms_norm or layer_norm",
)
def norm_by_hand(seen: Seen) -> Iterable[int]:
    modules = seen.trace.slots.module
    norms = {modules[slot.slot] for slot in seen.slots if slot.node == "RsqrtBackward0"}
    powers = {modules[slot.slot] for slot in seen.slots if slot.node == "PowBackward0"}
    for slot in seen.slots:
        inside = modules[slot.slot] in norms & powers
        if inside and slot.node in ("PowBackward0", "MulBackward0") and slot.storage in seen.saved_storages:
            yield slot.storage


@lint(
    "gelu-by-hand",
    what="GELU is composed of pow, tanh and mul, each of which saves an activation",
    try_='torch.nn.functional.gelu(x, approximate="tanh")',
)
def gelu_by_hand(seen: Seen) -> Iterable[int]:
    by_place: dict[tuple[int, tuple[int, ...]], set[str]] = defaultdict(set)
    modules = seen.trace.slots.module
    for slot in seen.slots:
        by_place[modules[slot.slot], slot.shape].add(slot.node)
    for slot in seen.slots:
        by_hand = {"PowBackward0", "TanhBackward0"} <= by_place[modules[slot.slot], slot.shape]
        part = slot.node in ("PowBackward0", "TanhBackward0", "MulBackward0")
        if by_hand and part and slot.storage in seen.saved_storages:
            yield slot.storage


@lint(
    "log-of-softmax",
    what="a loss takes the logarithm of a softmax: both are saved",
    try_="F.cross_entropy or F.log_softmax on the logits",
)
def log_of_softmax(seen: Seen) -> Iterable[int]:
    for slot in seen.slots:
        if slot.node == "LogBackward0" and slot.storage in seen.saved_storages:
            makers = {seen.made_by(slot.storage)} | {
                seen.made_by(s) for s in seen.reads_of(seen.maker(slot.storage))
            }
            if "_softmax" in makers:
                yield slot.storage


@lint(
    "sigmoid-before-the-loss",
    what="a binary cross entropy is taken of a sigmoid: both are saved",
    try_="F.binary_cross_entropy_with_logits",
)
def sigmoid_before_loss(seen: Seen) -> Iterable[int]:
    for slot in seen.slots:
        if (
            slot.node == "BinaryCrossEntropyBackward0"
            and slot.name == "self"
            and seen.made_by(slot.storage) == "sigmoid"
        ):
            yield slot.storage


@lint(
    "growing-cat",
    what="a tensor grows by torch.cat in a loop, and every stage of it is saved or copied",
    try_="collect in a list and torch.cat once",
)
def growing_cat(seen: Seen) -> Iterable[int]:
    chain: dict[int, int] = {}
    for op, name in enumerate(seen.names):
        if name == "cat" and seen.phase(op) == "forward":
            # a stage that something else reads as well (DenseNet, decoding) is needed, however it is made
            before = [chain[s] for s in seen.reads_of(op) if s in chain and _only_read_by(seen, s, "cat")]
            for value in seen.view.writes[op]:
                chain[seen.view.value_storage[value]] = 1 + max(before, default=0)
    long = {seen.trace.ops.line[seen.maker(s)] for s, length in chain.items() if length >= 8}
    for storage, length in chain.items():
        if length > 1 and seen.trace.ops.line[seen.maker(storage)] in long:
            yield storage


def _only_read_by(seen: Seen, storage: int, name: str) -> bool:
    return all(seen.names[op] == name for op in seen.readers.get(storage, []) if seen.phase(op) == "forward")
