"""Lets go of saved tensors as their actions say, and gives them back: made again, read back, or decoded.

What is in doubt is kept, and the account says why.
"""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from functools import cache

from torch import Tensor, UntypedStorage

from memopt.codecs.table import is_of_values
from memopt.enforcers.carried_out import Account
from memopt.enforcers.codecs.encoded import Encoded, flat_storage
from memopt.enforcers.codecs.premises import Call, hold
from memopt.enforcers.codecs.table import bytes_beyond, decode, encode, encode_for
from memopt.enforcers.handles import Planned
from memopt.enforcers.lookup import PlannedSlot
from memopt.enforcers.records import Value
from memopt.enforcers.replays import CannotReplay, make, show
from memopt.enforcers.tiers.swapped import SwappedStorage, Swapper
from memopt.enforcers.values import Values
from memopt.estimators.simulator.slot_needs import Need
from memopt.instrument.one_stream import OneStream
from memopt.instrument.saved import let_go_of_bytes
from memopt.instrument.torch_internals import DisableTorchDispatch, DispatchKey, ExcludeKey, storage_of
from memopt.plan import Action

log = logging.getLogger(__name__)

_OWN_NODE = re.compile(r"Backward\d+$")


@cache
def _only_reads(node: str) -> bool:
    """Is it a node of torch's own, whose backward writes over nothing that it has saved? A script's `Function` might."""
    return _OWN_NODE.search(node) is not None


class LettingGo:
    """For the `actions` of one plan."""

    def __init__(
        self,
        actions: list[Action],
        values: Values,
        swapper: Swapper | None,
        streams: OneStream,
        account: Account,
    ) -> None:
        self._actions, self._values, self._swapper = actions, values, swapper
        self._streams, self._account = streams, account
        self._ahead: dict[int, list[weakref.ref[Value]]] = {}
        """By action: what is to be made again before it is asked for."""

    def new_iteration(self) -> None:
        """Make ahead only what this iteration saves."""
        self._ahead.clear()

    def act(self, handle: Planned, reader: Call | None) -> None:
        """Let go of the tensor as planned; `reader` is the call whose node saved it, if it was seen."""
        guard = DisableTorchDispatch()  # or the mode counts a codec's ops among the script's
        alias = handle.tensor
        try:
            self._let_go(handle, reader)
        except Exception as error:
            handle.tensor, handle.witness, handle.content = alias, None, None
            log.warning("memopt failed to let go of a saved tensor, which is kept", exc_info=True)
            self._account.decline(handle.slot.action, f"memopt failed: {type(error).__name__}: {error}")
        finally:
            del guard

    def _let_go(self, handle: Planned, reader: Call | None) -> None:
        slot, tensor = handle.slot, handle.tensor
        assert tensor is not None
        another = self._streams.why_keep(tensor.device)
        if another:
            self._account.decline(slot.action, another)
        elif tensor._version != handle.version:
            self._account.decline(slot.action, "it was changed in place by the op that saved it")
        elif slot.kind == "recompute":
            self._drop_for_replay(handle, tensor)
        elif slot.kind == "swap":
            self._swap(handle, tensor)
        elif slot.ref.need != "values" and not hold(slot.ref, reader):
            self._account.decline(
                slot.action, f"{slot.ref.consumer or slot.ref.node} was not called as in the profile"
            )
        else:
            self._compress(handle, tensor)

    def _drop_for_replay(self, handle: Planned, tensor: Tensor) -> None:
        value = self._values.value_in(tensor, storage_of(tensor))
        if value is None:
            self._account.decline(handle.slot.action, "the op that made it was not seen")
            return
        value.waiting += 1
        action = self._actions[handle.slot.action]
        value.again, value.each = action.again or action.each, action.each
        if action.prefetch is not None and value.waiting == 1:
            self._ahead.setdefault(handle.slot.action, []).append(weakref.ref(value))
        self._take(handle, value)

    def _swap(self, handle: Planned, tensor: Tensor) -> None:
        if self._swapper is None:
            self._account.decline(handle.slot.action, "there is no place to swap to")
            return
        content = self._swapper.swap_out(handle.slot.action, storage_of(tensor))
        if content is None:
            self._account.decline(handle.slot.action, self._swapper.reason)
            return
        self._values.is_swapped(tensor, content)
        self._take(handle, content)

    def _compress(self, handle: Planned, tensor: Tensor) -> None:
        slot = handle.slot
        if slot.ref.need == "values":
            encoded = self._encode_storage(slot, tensor)
        else:
            params = {name: tuple(v) if isinstance(v, list) else v for name, v in slot.ref.params.items()}
            encoded = encode_for(Need(slot.ref.need, tuple(params.items())), tensor)
        if encoded is None:
            self._account.decline(slot.action, f"codec {slot.codec} does not apply to these values")
            return
        self._take(handle, encoded)

    def _encode_storage(self, slot: PlannedSlot, tensor: Tensor) -> Encoded | None:
        """One encoded form for all views of a storage, and for the replays that read it."""
        storage = storage_of(tensor)
        encoded = self._values.encoded_form(storage, tensor._version)
        if encoded is None and is_of_values(slot.codec):
            row, params = flat_storage(tensor), slot.ref.params
            encoded = encode(slot.codec, row, params)
            beyond = bytes_beyond(slot.codec, row, params, encoded)
            self._account.beyond[slot.action] = max(self._account.beyond[slot.action], beyond)
            if encoded is not None:
                self._values.is_encoded(storage, tensor._version, encoded)
        return encoded

    def _take(self, handle: Planned, content: Value | SwappedStorage | Encoded) -> None:
        handle.content = content
        handle.witness, handle.tensor = handle.tensor, None
        assert handle.witness is not None
        let_go_of_bytes(handle.witness)
        self._account.done[handle.slot.action] += 1

    def make_ahead(self, actions: list[int]) -> None:
        """Make again what these have let go of, and hold it for those who will ask. What cannot be made is left to them."""
        guard = DisableTorchDispatch()
        try:
            for action in actions:
                for value in filter(None, (each() for each in self._ahead.pop(action, ()))):
                    if value.waiting > 0 and value.there() is None:
                        with contextlib.suppress(CannotReplay):
                            make(value, self._values.kept)
        finally:
            del guard

    def here(self, handle: Planned) -> UntypedStorage | None:
        """What `restore` would show, where its bytes are there already: another slot has asked for it, a copy back has begun."""
        content = handle.content
        if isinstance(content, Value):
            return content.here
        if isinstance(content, SwappedStorage):
            return content.source() or content.here
        return None

    def restore(self, handle: Planned) -> Tensor:
        """The tensor, made again, read back or decoded."""
        guard = DisableTorchDispatch()  # making a tensor of bytes is nothing for a mode that watches backward
        try:
            return self._saved_again(handle) if self._values.makes_graph else self._restored(handle)
        finally:
            del guard

    def _saved_again(self, handle: Planned) -> Tensor:
        """As `_restored`, in a backward call that makes a graph, which may save the tensor once more: its version counter begins with 0, for
        nobody has written it, whatever it was laid over."""
        with ExcludeKey(DispatchKey.ADInplaceOrView, True):
            tensor = self._restored(handle)
        if isinstance(handle.content, Value):
            self._values.made_again(handle.content, tensor)
        return tensor

    def _restored(self, handle: Planned) -> Tensor:
        content = handle.content
        if isinstance(content, Value):
            tensor = show(content, handle.place, self._values.kept)
            if not handle.served or content.each:
                only_read = _only_reads(handle.slot.ref.node)
                content.serve(storage_of(tensor), first=not handle.served, only_read=only_read)
                handle.served = True
            return tensor
        if isinstance(content, SwappedStorage):
            tensor = handle.on(content.get())
            if not handle.served:
                handle.served = True
                content.served()
            return tensor
        assert isinstance(content, Encoded)
        whole = decode(content)
        return whole if handle.slot.ref.need != "values" else handle.on(storage_of(whole))
