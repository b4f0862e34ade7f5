"""Two threads of backward, one for each device, in the middle of each other's calls; without a lock it would show."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memopt.enforcers.tiers import disk, host, swapped
from tests.late.late_device import LateEvent, Race
from tests.late.late_training import Kit, Layer, training
from tests.support.mutants import mutant

LAYER = Layer(device=0, home=0, saver=0, readers=(0,), nbytes=1000, tier="host")
UNLOCKED = ("threading.RLock()", "__import__('contextlib').nullcontext()")
EARLY_S = 0.05
"""So long the other thread may go on, if nothing holds it."""


def one_read(kit: Kit, folder: Path) -> None:
    with training((LAYER,), folder, kit=kit) as steps:
        content = steps.swapper.swap_out(0, steps.filled(0))
        steps.swapper.wait_for_all()
        others: list[threading.Thread] = []
        allocate = steps.allocate

        def allocated(*args: Any) -> Any:
            made = allocate(*args)
            if not others:
                others.append(threading.Thread(target=lambda: steps.look_at(content.get(), 0)))
                others[0].start()
                others[0].join(EARLY_S)
            return made

        kit.swapped.UntypedStorage = lambda nbytes, device: allocated(nbytes, device)
        content.prefetch()
        others[0].join()
        steps.look_at(content.get(), 0)
        (store,) = steps.tiers["host"].stores
        assert store.read_bytes == 1000, "one of them brings it, for both"


def nothing_dropped_early(kit: Kit, folder: Path) -> None:
    with training((LAYER,) * 3, folder, kit=kit) as steps:
        steps.world.haste = 0.0
        contents = [steps.swapper.swap_out(number, steps.filled(number)) for number in range(3)]
        (store,) = steps.tiers["host"].stores
        tickets = [content._ticket for content in contents]
        tickets[1].copied.synchronize()
        others: list[threading.Thread] = []
        asked, questions = steps.world.asked, 0

        def asked_twice(event: LateEvent) -> bool:
            nonlocal questions
            questions += 1
            answer = asked(event)
            if not others and questions > 1:  # the first is asked about without the lock
                others.append(threading.Thread(target=store.collect))
                others[0].start()
                others[0].join(EARLY_S)
            return answer

        steps.world.asked = asked_twice  # type: ignore[method-assign]
        store.collect()
        others[0].join()
        assert [ticket.source is None for ticket in tickets] == [True, True, tickets[2].copied.passed]


def each_dropped_once(kit: Kit, folder: Path) -> None:
    layer = dataclasses.replace(LAYER, tier="disk")
    with training((layer,), folder, kit=kit) as steps:
        content = steps.swapper.swap_out(0, steps.filled(0))
        content._ticket.written.result()
        (store,) = steps.tiers["disk"].stores
        others: list[threading.Thread] = []

        class Watched(collections.deque[Any]):
            def popleft(self) -> Any:
                if not others:
                    others.append(threading.Thread(target=store.collect))
                    others[0].start()
                    others[0].join(EARLY_S)
                return super().popleft()

        store._safe = Watched(store._safe)
        assert store.collect() == 1000
        others[0].join()


COLLECTED = ("with self._lock:  # backward has a thread for each device", "with contextlib.nullcontext():")


@pytest.mark.parametrize(
    ("check", "module", "unlocked"),
    [
        (one_read, swapped, UNLOCKED),
        (nothing_dropped_early, host, UNLOCKED),
        (each_dropped_once, disk, COLLECTED),
    ],
)
def test_a_second_thread_in_the_middle(
    check: Callable[[Kit, Path], None], module: Any, unlocked: tuple[str, str], tmp_path: Path
) -> None:
    check(Kit(), tmp_path)
    name = module.__name__.rpartition(".")[2]
    with pytest.raises((AssertionError, Race, IndexError)):
        check(Kit(**{name: mutant(module, *unlocked)}), tmp_path)
