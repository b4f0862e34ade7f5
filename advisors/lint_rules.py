"""The rules of `memopt.advisors.lints`: one function each, which yields the storages at stake."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from memopt.advisors.lints import Seen, lint

_SIXTEEN_BIT = ("bf16", "fp16")
_LAST_DIM = 2**64 - 1
"""A dimension of -1, which autograd's nodes keep unsigned."""
_MASKING = {("MulBackward0", "other"), ("WhereBackward0", "condition"), ("MaskedFillBackward0", "mask")}


@lint(
    "graph-kept",
    what="activations are still held by a graph when the iteration ends, though no backward has asked for them",
    try_="keep loss.item() or output.detach(), not the tensor",
)
def graph_kept(seen: Seen) -> Iterable[int]:
    for storage, saved in seen.view.saved.items():
        if saved.first_use >= seen.n and saved.release >= seen.n and seen.category(storage) == "activation":
            yield storage


@lint(
    "evaluation-records-a-graph",
    what="tensors are saved for a backward that never comes, and thrown away",
    try_="with torch.no_grad(): around the evaluation",
)
def evaluation_records_a_graph(seen: Seen) -> Iterable[int]:
    for storage, saved in seen.view.saved.items():
        if saved.first_use >= seen.n and saved.release < seen.n and seen.category(storage) != "input":
            yield storage


@lint(
    "activation-held-by-the-script",
    what="activations outlive the backward that used them, because the script holds them as well",
    try_="do not keep outputs in lists or attributes; .detach() what is only looked at",
)
def activation_held(seen: Seen) -> Iterable[int]:
    found = [
        storage
        for storage, saved in seen.view.saved.items()
        if saved.last_use < seen.n <= saved.release
        and seen.category(storage) == "activation"
        and seen.is_inside_a_module(storage)
        and not seen.is_read_outside_modules(storage)
    ]
    # outputs, of which the loss is made outside, stay in the loop's variables until the next step; so may a single other
    if len(found) > 1 and not seen.differentiates_twice:
        yield from found


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
        square = len(slot.shape) >= 3 and slot.shape[-1] == slot.shape[-2]
        over_last = seen.attribute(slot, "dim") in (_LAST_DIM, len(slot.shape) - 1, None)
        if slot.node == "SoftmaxBackward0" and square and over_last and slot.storage in seen.saved_storages:
            yield slot.storage


@lint(
    "materialised-mask",
    what="a mask is saved at the full size of what it masks",
    try_="a mask with dimensions of 1, which broadcasts",
)
def materialised_mask(seen: Seen) -> Iterable[int]:
    for slot in seen.slots:
        square = len(slot.shape) >= 3 and slot.shape[-1] == slot.shape[-2] > 1
        if (slot.node, slot.name) in _MASKING and square and slot.dtype == "bool":
            size = 1
            for extent in slot.shape:
                size *= extent
            if int(seen.view.size[slot.storage]) >= size and slot.storage in seen.saved_storages:
                yield slot.storage


@lint(
    "gradients-zeroed-in-place",
    what="gradients are filled with zeros instead of being freed, so they are there during forward",
    try_="optimizer.zero_grad(), whose default is set_to_none=True",
)
def gradients_zeroed(seen: Seen) -> Iterable[int]:
    for op, name in enumerate(seen.names):
        if name in ("zero_", "_foreach_zero_"):
            for value in seen.view.writes[op]:
                if seen.category(seen.view.value_storage[value]) == "gradient":
                    yield seen.view.value_storage[value]


@lint(
    "foreach-optimizer-peak",
    what="the peak is inside the optimizer's step, made by the temporaries of its foreach form",
    try_="fused=True, or foreach=False",
)
def foreach_peak(seen: Seen) -> Iterable[int]:
    if not seen.n:
        return
    peak = int(seen.view.high.argmax())
    if seen.phase(peak) != "optimizer":
        return
    for storage in seen.of_category("temporary"):
        birth = seen.maker(storage)
        if birth <= peak <= seen.view.death[storage] and seen.made_by(storage).startswith("_foreach"):
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
    "gradient-in-no-optimizer",
    what="gradients are computed for parameters that no optimizer reads",
    try_="requires_grad_(False) for them, or give them to the optimizer",
)
def gradient_in_no_optimizer(seen: Seen) -> Iterable[int]:
    if seen.differentiates_twice or not any(seen.phase(op) == "optimizer" for op in range(seen.n)):
        return
    for storage in seen.of_category("gradient"):
        readers = seen.readers.get(storage, [])
        made = any(seen.phase(op) == "backward" for op, _ in seen.view.value_times[storage] if op >= 0)
        if made and not any(seen.phase(op) == "optimizer" for op in readers):
            yield storage


@lint(
    "input-requires-grad",
    what="a gradient is computed for the input data",
    try_="do not call requires_grad_() on a batch whose gradient nobody reads",
)
def input_requires_grad(seen: Seen) -> Iterable[int]:
    if seen.differentiates_twice:
        return
    # a leaf that is made in the iteration and gets a gradient is filed as a parameter
    for storage in seen.of_category("parameter"):
        if seen.maker(storage) >= 0:
            yield storage
    position = {
        ("ConvolutionBackward0", "input"): 0,
        ("AddmmBackward0", "mat1"): 1,
        ("MmBackward0", "self"): 0,
    }
    for slot in seen.slots:
        at = position.get((slot.node, slot.name))
        grads = seen.needs_grad(slot)
        if at is not None and len(grads) > at and grads[at] and seen.category(slot.storage) == "input":
            yield slot.storage


@lint(
    "weights-cast-again-and-again",
    what="the same parameters are cast to 16 bit several times in one iteration, and the copies are saved",
    try_="one autocast region around all of forward, with its cache enabled",
)
def repeated_casts(seen: Seen) -> Iterable[int]:
    copies: dict[int, list[int]] = defaultdict(list)
    for storage in seen.saved_storages:
        if seen.made_by(storage) == "_to_copy":
            for source in seen.reads_of(seen.maker(storage)):
                if seen.category(source) == "parameter":
                    copies[source].append(storage)
    for made in copies.values():
        made.sort(key=seen.maker)
        for earlier, later in pairwise(made):
            if seen.view.death[earlier] >= seen.maker(later):
                yield later


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
    "graph-retained",
    what="the graph is kept after backward, with all that it has saved",
    try_="one backward over the sum of the losses, without retain_graph=True",
)
def graph_retained(seen: Seen) -> Iterable[int]:
    if seen.trace.facts.get("keep_graph", 0) > 0 and not seen.differentiates_twice:
        for slot in seen.slots:
            if len(slot.uses) > 1 and slot.storage in seen.saved_storages:
                yield slot.storage


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


@lint(
    "parameters-never-used",
    what="parameters are on the device that no op of the iteration reads",
    try_="delete what the model does not use, or leave it on the CPU",
)
def parameters_never_used(seen: Seen) -> Iterable[int]:
    for storage in seen.of_category("parameter"):
        stays = seen.maker(storage) < 0 and seen.view.death[storage] >= seen.n
        if stays and not seen.readers.get(storage) and len(seen.view.value_times[storage]) <= 1:
            yield storage
