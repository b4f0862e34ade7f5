"""Frozen weights, and those that something beside their modules holds.

Frozen is what nothing trains, as LoRA's base, a teacher or the network of a perceptual loss.

One rule for the profile, which tells which there are, and for the run, which streams them: parameters and buffers of modules without
modules below them (a linear layer, a convolution, an embedding), so that whoever reads one past torch's dispatcher is inside a call of
the module that owns it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from torch import Tensor, nn

from memopt.instrument.identity import NO_STORAGE
from memopt.instrument.ops import is_lent, is_plain, is_shared

LEAST_BYTES = 1 << 20
"""Smaller ones are not worth a copy."""


def frozen_weights(modules: Iterable[nn.Module]) -> dict[int, list[Tensor]]:
    """Address of a storage (`_cdata`) -> the parameters and buffers of `modules` that lie in it, where none of them is trained: one that
    has a gradient is, if not just now (a discriminator while its generator steps)."""
    found: dict[int, dict[int, Tensor]] = {}
    others: set[int] = set()
    for module, each in _plain_tensors(modules):
        address = each.untyped_storage()._cdata
        if each.requires_grad or each.grad is not None or not is_leaf(module):
            others.add(address)
        found.setdefault(address, {})[id(each)] = each
    return {
        address: [*tensors.values()]
        for address, tensors in found.items()
        if address not in others and _may_leave(next(iter(tensors.values())))
    }


def held_beside(
    modules: Iterable[nn.Module], tensors: Iterable[Tensor], saved: Container[int]
) -> list[Tensor]:
    """Parameters and buffers of `modules`, of `LEAST_BYTES` or more, one of each storage that is lent, or shared, or in which others of
    `tensors` lie: a list of `.data` as averages of weights are made with. `saved`: ids of those that autograd holds, which do not count."""
    owned: dict[int, Tensor] = {}
    own: set[int] = set()
    found: dict[int, Tensor] = {}
    for _, each in _plain_tensors(modules):
        storage = each.untyped_storage()
        if storage.nbytes() >= LEAST_BYTES:
            owned.setdefault(storage._cdata, each)
            own.add(id(each))
            if not _may_leave(each):
                found[storage._cdata] = each
    for each in tensors if owned else ():
        if id(each) in own or id(each) in saved:
            continue
        try:
            address = each.untyped_storage()._cdata
        except NO_STORAGE:
            continue
        if address in owned:
            found[address] = owned[address]
    return [*found.values()]


def owners_of(modules: Iterable[nn.Module]) -> dict[int, list[nn.Module]]:
    """Address of a storage -> those of `modules` that have parameters or buffers in it."""
    found: dict[int, dict[int, nn.Module]] = {}
    for module, each in _plain_tensors(modules):
        found.setdefault(each.untyped_storage()._cdata, {})[id(module)] = module
    return {address: [*owners.values()] for address, owners in found.items()}


def _plain_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Tensor]]:
    for module in modules:
        for each in tensors_of(module):
            if is_plain(each):
                yield module, each


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Its own parameters and buffers, past whatever it makes of attributes."""
    tables = (vars(module).get(name, {}) for name in ("_parameters", "_buffers"))
    return [each for table in tables for each in table.values() if isinstance(each, Tensor)]


def is_leaf(module: nn.Module) -> bool:
    """Has it no modules below it?"""
    return not any(each is not None for each in vars(module).get("_modules", {}).values())


def _may_leave(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    return storage.nbytes() >= LEAST_BYTES and not is_lent(storage) and not is_shared(storage)
