"""Optimizer state that is in a tier between steps: what stands for `optimizer.state` meanwhile.

Whoever reads it but the paged step (`state_dict`, a checkpoint, a logger) finds it whole: the first look brings all of it back, and it
stays until the script goes on to train: until it saves a tensor for backward, or, once it has, until the next step has ended. A forked
child could not bring it back: it is whole before the script forks, except for a DataLoader's workers, which do not look.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from memopt.errors import MemoptError
from memopt.instrument.script.forks import bring_back_before_forks
from memopt.instrument.stepping.handed_out import tell_of_looks, watch_what_is_handed_out
from memopt.instrument.stepping.whole_first import WholeFirst, whole_first


@whole_first("__reduce__")
class StateElsewhere(WholeFirst, defaultdict[Any, Any]):
    """`optimizer.state`, as its owner's `bring_back` makes it whole."""

    bring_back: Callable[[], None]

    def __init__(
        self,
        state: dict[Any, Any],
        bring_back: Callable[[], None],
        looked_at: Callable[[], None] | None = None,
    ) -> None:
        """`looked_at`: in place of `bring_back` where it is the script that looks."""
        super().__init__(dict)
        for key in dict.keys(state):
            dict.__setitem__(self, key, dict.__getitem__(state, key))
        self.bring_back = bring_back
        self.looked_at = looked_at or bring_back
        tell_of_looks(self)
        _living[id(self)] = self

    def __reduce__(self) -> Any:
        """Copied and pickled as what torch makes: a plain `defaultdict`."""
        return defaultdict, (dict,), None, None, iter(list(dict.items(self)))

    def copy(self) -> Any:
        return defaultdict(dict, dict.items(self))


def stand_in(
    optimizer: torch.optim.Optimizer, bring_back: Callable[[], None], looked_at: Callable[[], None]
) -> weakref.ref[StateElsewhere]:
    """Put one in the place of the optimizer's state; it goes with the optimizer, or with whoever has taken it."""
    optimizer.state = state = StateElsewhere(optimizer.state, bring_back, looked_at)
    watch_what_is_handed_out(optimizer)
    return weakref.ref(state)


_living: weakref.WeakValueDictionary[int, StateElsewhere] = weakref.WeakValueDictionary()
"""By id, since none can be hashed."""

bring_back_before_forks(_living.values, lambda state: state.looked_at(), MemoptError)
