"""CUDA streams of a script: which one an op runs on, since the allocator keeps free blocks for each stream apart.

A backward op runs on the stream of its forward op, as autograd has it. Not followed: how far a stream lags behind, so a block that
`record_stream` holds back for another stream is taken to be free as soon as its tensor is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memopt.instrument.torch_internals import current_node, sequence_nr

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder

_POOL = 32
"""Streams of one priority; the next one made is the first again (c10/cuda/CUDAStream.cpp)."""


class Streams:
    """The stream that ops of one recording go to; 0 is the default one."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.asked = 0
        """Of the innermost stream context."""
        self.inside_backward = 0
        """How many contexts were entered by hooks while autograd runs."""
        self.captures_in = 0
        """Number of the pool of the CUDA graph that is being captured; 0: none is."""
        self.any = False
        """Whether there is any but the default one."""
        self._made = [0, 0]
        self._of_node: dict[int, int] = {}

    def made(self, priority: int) -> int:
        """The number of a new stream, below 0 being of high priority."""
        high, self.any = priority < 0, True
        self._made[high] += 1
        return 1 + high * _POOL + (self._made[high] - 1) % _POOL

    def handle(self) -> int:
        """The stream whose cuBLAS workspace the op being run takes: a capture's own, whatever pool it fills."""
        return self.asked if self.captures_in else self.now()

    def now(self) -> int:
        """The stream of the op being run, or the pool that it allocates from."""
        if self.captures_in:
            return self.captures_in
        if not self.any:
            return 0
        watch = self.recorder.watch
        if watch is not None and watch.in_backward and not self.inside_backward:
            node = current_node()
            return self._of_node.get(node._sequence_nr(), 0) if node is not None else self.asked
        if self.asked and torch.is_grad_enabled():
            self._of_node[sequence_nr() - 1] = self.asked
        return self.asked


def install(recorder: Recorder) -> None:
    """Patch torch in this process, for good."""
    innermost: list[Any] = []
    """The stream of the innermost context."""
    entered, choose = _contexts(recorder, innermost)
    stream = _stream_class(recorder.streams, entered)
    default = stream.__new__(stream)
    default.cuda_stream = default.stream_id = default.priority = 0
    default._before = []
    innermost.append(default)

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        recorder.guesser.remark(
            "record_stream: what another stream still reads is taken to be free at once, where the GPU may hold it longer"
        )

    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    cuda.Stream = cuda.ExternalStream = stream
    cuda.current_stream = lambda device=None: innermost[0]
    cuda.default_stream = lambda device=None: default
    cuda.stream = cuda.StreamContext = entered
    cuda.set_stream = choose
    tensor.record_stream = record_stream


def _stream_class(streams: Streams, entered: Any) -> Any:
    class Stream:
        """A stream that everything is already done on."""

        device = torch.device("cuda", 0)
        device_index = 0

        def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
            self.cuda_stream = self.stream_id = streams.made(priority)
            self.priority = priority
            self._before: list[Any] = []

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def synchronize(self) -> None:
            pass

        def wait_stream(self, stream: Any) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            return event if event is not None else torch.cuda.Event()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

        def __hash__(self) -> int:
            return hash(self.cuda_stream)

        def __enter__(self) -> Stream:
            self._before.append(entered(self))
            self._before[-1].__enter__()
            return self

        def __exit__(self, *exc: Any) -> None:
            self._before.pop().__exit__(*exc)

    return Stream


def _contexts(recorder: Recorder, innermost: list[Any]) -> tuple[Any, Callable[[Any], None]]:
    """The class of `torch.cuda.stream`, and `torch.cuda.set_stream`."""
    streams = recorder.streams

    class Entered:
        """`torch.cuda.stream(stream)`; nothing happens for None."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> Any:
            watch = recorder.watch
            self.hooked = int(watch is not None and watch.in_backward)
            self.outer = innermost[0]
            choose(self.stream)
            streams.inside_backward += self.hooked
            return self.stream

        def __exit__(self, *exc: Any) -> None:
            choose(self.outer)
            streams.inside_backward -= self.hooked

    def choose(stream: Any) -> None:
        if stream is not None:
            innermost[0], streams.asked = stream, stream.cuda_stream

    return Entered, choose
