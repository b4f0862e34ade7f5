"""CUDA graphs of a script: what is captured is allocated from a pool of the graph's own, which nothing else may use and which stays.

The allocator keeps free blocks for each stream apart; a pool is one more stream here. What differs: a real one's free segments are
not given back when memory runs out. A replay makes no tensors, and computes nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memopt.estimators.fake.torch_internals import set_native

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder

_FIRST = 1 << 16
"""Number of the first pool; streams have smaller ones."""


class Pools:
    """The private pools of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._numbers = itertools.count(_FIRST)

    def made(self) -> tuple[int, int]:
        """A new pool, named as torch names them."""
        return 0, next(self._numbers)

    @contextmanager
    def inside(self, pool: tuple[int, int]) -> Iterator[None]:
        """What is allocated here, and by the backward of what runs here, comes from `pool`."""
        streams = self.recorder.streams
        before, streams.asked, streams.any = streams.asked, pool[1], True
        try:
            yield
        finally:
            streams.asked = before

    def graphed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` as `mode="reduce-overhead"` of torch.compile runs it: in a pool."""
        pool = self.made()

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.inside(pool):
                return call(*args, **kwargs)

        return run


def install(recorder: Recorder) -> None:
    """Patch torch in this process, for good."""
    pools = recorder.pools
    capturing: list[Any] = []

    class CUDAGraph:
        """Keeps what it captured; replays nothing."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._pool: tuple[int, int] | None = None

        def capture_begin(self, pool: Any = None, *args: Any, **kwargs: Any) -> None:
            self._pool = pool or self._pool or pools.made()
            recorder.streams.captures_in = self._pool[1]
            capturing.append(self)

        def capture_end(self) -> None:
            recorder.streams.captures_in = 0
            capturing.pop()

        def pool(self) -> Any:
            return self._pool

        def replay(self) -> None:
            recorder.guesser.remark("CUDA graphs were captured on fake tensors, and not replayed")

        instantiate = reset = enable_debug_mode = replay
        debug_dump = lambda self, *args: None  # noqa: E731

    class MemPool:
        """A pool that a script makes itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.id = pools.made()

    cuda: Any = torch.cuda
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = CUDAGraph
    cuda.graph_pool_handle = cuda.graphs.graph_pool_handle = pools.made
    cuda.is_current_stream_capturing = lambda: bool(capturing)
    cuda.MemPool = cuda.memory.MemPool = MemPool
    cuda.use_mem_pool = cuda.memory.use_mem_pool = lambda pool, device=None: pools.inside(pool.id)
    set_native("host_emptyCache", lambda: None)
