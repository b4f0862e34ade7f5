"""Data loaders without their worker processes: batches are loaded here, and what only a worker would have held is not counted.

A batch that a worker made is mapped into the script's process when it is received. Workers that are ahead of their turn have theirs
received early: how many wait depends on timing, so none is recorded and the most that is usual is told.

Once training steps are known to be alike, a loader that would deliver many more batches ends: what follows an epoch is worth more.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.torch_internals import LoaderInProcess
from memopt.instrument.torch_internals import tree_iter

_LEAST = 2
"""Batches that every loader delivers: an evaluation's too."""
_ALONE = {
    "num_workers": 0, "pin_memory": False, "prefetch_factor": None, "persistent_workers": False,
    "multiprocessing_context": None, "timeout": 0,
}  # fmt: skip


def install(recorder: FakeRecorder) -> None:
    """Patch torch in this process, for good."""
    loader: Any = torch.utils.data.DataLoader
    alone = LoaderInProcess
    init, begin = loader.__init__, alone.__init__
    signature = inspect.signature(init)

    def in_process(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        workers = bound.arguments.get("num_workers") or 0
        if workers:
            recorder.guesser.remark(
                "DataLoader workers were not started: batches were loaded in the process itself"
            )
        for name, value in _ALONE.items():
            if name in bound.arguments:
                bound.arguments[name] = value
        init(*bound.args, **bound.kwargs)
        self._memopt_workers = workers

    def begun(self: Any, loader: Any) -> None:
        begin(self, loader)
        workers = getattr(loader, "_memopt_workers", 0)
        if workers and recorder.target == "cpu":
            self._dataset_fetcher = _Worker(self._dataset_fetcher, recorder, workers)

    take = alone.__next__

    def taken(self: Any) -> Any:
        enough = recorder.batches_enough
        self._memopt_given = getattr(self, "_memopt_given", 0) + 1
        if enough is None:
            self._memopt_more = 0
        else:
            self._memopt_more = getattr(self, "_memopt_more", 0) + 1
            if self._memopt_more > enough and self._memopt_given > _LEAST:
                recorder.guesser.remark(
                    "steps are alike: epochs were cut short, to follow what comes after them"
                )
                raise StopIteration
        return take(self)

    loader.__init__ = in_process
    alone.__init__ = begun
    alone.__next__ = taken


class _Worker:
    """Fetches batches as another process would."""

    def __init__(self, fetcher: Any, recorder: FakeRecorder, workers: int) -> None:
        self.fetcher, self.recorder, self.others = fetcher, recorder, workers - 1

    def fetch(self, index: Any) -> Any:
        with self.recorder.claiming("elsewhere"):
            batch = self.fetcher.fetch(index)
        before = self.recorder.live_bytes
        for tensor in _tensors(batch):
            self.recorder.adopt(tensor, self.recorder.target)
        self.recorder.may_take(self.others * (self.recorder.live_bytes - before))
        return batch


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Those of a batch, and of objects in it."""
    for leaf in tree_iter(batch):
        for each in (leaf, *tree_iter(getattr(leaf, "__dict__", {}))):
            if isinstance(each, torch.Tensor):
                yield each
