"""Lints about the training loop: what it keeps, zeroes, steps, and calls. One function each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from memopt.advisors.lints.registry import Seen, lint
from memopt.trace import CACHE_EMPTIED, IN_A_LIST


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
    "kept-across-iterations",
    what="outputs or losses with their graph are kept from one iteration to the next, one more each time",
    try_="keep loss.item() or output.detach(), not the tensor",
    any_size=True,
)
def kept_across_iterations(seen: Seen) -> Iterable[int]:
    kept = [
        storage
        for storage in seen.of_category("activation")
        if seen.maker(storage) < 0 and seen.view.death[storage] >= seen.n
    ]
    by_shape: dict[str, list[int]] = defaultdict(list)
    for storage in kept:
        by_shape[seen.trace.storage_label(storage).partition(" · ")[2]].append(storage)
    for alike in by_shape.values():
        in_a_list = any(IN_A_LIST in seen.trace.storage_label(storage) for storage in alike)
        for storage in alike:
            # a list that grows: what the last step gave is in a variable when this one begins; or a sum, `total += loss`
            if (in_a_list and len(alike) > 1) or seen.writers(storage):
                yield storage


@lint(
    "evaluation-records-a-graph",
    what="tensors are saved for a backward that never comes, and thrown away",
    try_="with torch.no_grad(): around what computes them (an evaluation, a look-up), or .detach() what they are computed from",
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
    "gradient-in-no-optimizer",
    what="gradients are computed for parameters that no optimizer reads",
    try_="requires_grad_(False) for them, or give them to the optimizer",
)
def gradient_in_no_optimizer(seen: Seen) -> Iterable[int]:
    read_elsewhere = seen.trace.updates is not None and seen.trace.updates.others_read
    steps = any(seen.phase(op) == "optimizer" for op in range(seen.n))
    if seen.differentiates_twice or read_elsewhere or not steps:
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
    updates = seen.trace.updates
    # adversarial training and style transfer want it: they read `.grad`, or ask for it by `torch.autograd.grad`
    asked_for = seen.trace.facts.get("grad_calls", 0) > 0
    if seen.differentiates_twice or asked_for or updates is None or updates.others_read != 0:
        return
    # a leaf that is made in the iteration and gets a gradient is filed as a parameter, as is what the script puts in a parameter's place (`p.data = ...`)
    for storage in seen.of_category("parameter"):
        if seen.maker(storage) >= 0 and not seen.trace.owner_of(storage):
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
    "parameters-never-used",
    what="parameters are on the device that no op of the iteration reads",
    try_="delete what the model does not use, or leave it on the CPU",
)
def parameters_never_used(seen: Seen) -> Iterable[int]:
    for storage in seen.of_category("parameter"):
        stays = seen.maker(storage) < 0 and seen.view.death[storage] >= seen.n
        if stays and not seen.readers.get(storage) and len(seen.view.value_times[storage]) <= 1:
            yield storage


@lint(
    "gradients-copied-into-buckets",
    what="gradients are copied into the buckets that DistributedDataParallel reduces, and back",
    try_="DistributedDataParallel(..., gradient_as_bucket_view=True)",
)
def copied_into_buckets(seen: Seen) -> Iterable[int]:
    buckets: set[int] = set()
    for op in range(seen.n):
        if seen.phase(op) != "backward":
            continue
        if seen.trace.op_name(op).startswith("c10d.allreduce"):
            buckets.update(s for s in seen.reads_of(op) if seen.category(s) != "gradient")
        elif seen.names[op] == "copy_":
            written = {seen.category(seen.view.value_storage[value]) for value in seen.view.writes[op]}
            if "gradient" in written:
                yield from buckets.intersection(seen.reads_of(op))


@lint(
    "cache-emptied",
    what="the allocator's cache is emptied in every iteration, so that the next one has to ask the driver for memory again",
    try_="leave torch.cuda.empty_cache() out of the loop: it frees nothing that tensors hold",
    any_size=True,
)
def cache_emptied(seen: Seen) -> Iterable[str]:
    for name, count in seen.trace.facts.items():
        if name.startswith(CACHE_EMPTIED) and count > 0:
            yield name.removeprefix(CACHE_EMPTIED)
