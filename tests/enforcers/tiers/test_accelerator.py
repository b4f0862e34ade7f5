"""What the tiers ask of torch and CUDA, with both pretended: no GPU is needed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.enforcers.tiers import accelerator
from memopt.enforcers.tiers.accelerator import TorchAccelerator
from memopt.enforcers.tiers.swap import SwapFailed

GPU = torch.device("cuda", 1)


class Runtime:
    """Of CUDA: whether a row can be registered, and the error that a refusal leaves behind."""

    def __init__(self) -> None:
        self.allocator = "native"
        self.refuses = 0
        self.error = 0
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.refuses:
            self.error = 2
            return 2
        self.registered.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def launch(self) -> None:
        """Any kernel: torch asks for the last error after it."""
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: made.allocator)
    monkeypatch.setattr(accelerator, "_cuda_runtime", lambda: made)
    empty = torch.empty

    def pretended(*size: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory and made.refuses > 1:
            raise RuntimeError("cannot pin")
        row = empty(*size, **kwargs)
        if device is not None:
            assert device == GPU
            fill = row.fill_
            row.fill_ = lambda value: (fill(value), made.launch())[0]  # type: ignore[method-assign]
        return row

    monkeypatch.setattr(torch, "empty", pretended)
    return made


def test_a_row_is_registered_as_it_is(runtime: Runtime) -> None:
    here = TorchAccelerator(GPU)
    row = here.pinned(1000)
    assert row.nbytes == 1000
    assert runtime.registered == [row.data_ptr()]
    here.unpin(row)
    assert runtime.registered == []


def test_what_the_device_copies_from_is_in_pages_that_no_forked_child_shares(runtime: Runtime) -> None:
    """Whoever writes first into a shared page gets another one, and the device would go on with the old."""
    row = TorchAccelerator(GPU).pinned(10_000)
    row.fill_(7)
    mappings = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
    )
    (mine,) = (each for each in mappings[1:] if _holds(each, row.data_ptr()))
    flags = re.search(r"^VmFlags: (.*)$", mine, flags=re.MULTILINE)
    assert flags is not None
    assert "dc" in flags[1].split(), "do not copy on fork"


def _holds(mapping: str, address: int) -> bool:
    begin, end = (int(each, 16) for each in mapping.split(" ", 1)[0].split("-"))
    return begin <= address < end


def test_a_refusal_leaves_no_error_to_the_scripts_next_kernel(runtime: Runtime) -> None:
    runtime.refuses = 1
    row = TorchAccelerator(GPU).pinned(1000)
    assert row.nbytes == 1000
    runtime.launch()


def test_what_cannot_be_pinned_at_all_is_told(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.refuses = 2
    with pytest.raises(SwapFailed, match="1000 bytes of host memory cannot be pinned"):
        TorchAccelerator(GPU).pinned(1000)
    runtime.refuses = 1
    monkeypatch.setattr(accelerator, "most_bytes", lambda: 1023)
    with pytest.raises(SwapFailed) as caught:
        TorchAccelerator(GPU).pinned(1000)
    assert caught.value.why == "torch rounds up to 1024 bytes, and the host has 1023 left"


def test_a_threads_device_is_ours_inside_and_set_back_without_a_context(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`exchange` makes a context where there is none, `maybeExchange` does not."""
    said: list[tuple[str, int]] = []
    for name in ("exchange", "maybeExchange"):
        answer = lambda index, name=name: said.append((name, index)) or 0  # noqa: E731
        monkeypatch.setattr(torch._C, f"_accelerator_{name}Device", answer)
    with TorchAccelerator(GPU).here():
        assert said == [("exchange", 1)]
    assert said[1:] == [("maybeExchange", 0)]


def test_a_device_that_is_no_accelerator_is_refused(runtime: Runtime) -> None:
    with pytest.raises(SwapFailed, match="cpu is not an accelerator's memory"):
        TorchAccelerator(torch.device("cpu"))


@pytest.mark.parametrize("allocator", ["native", "cudaMallocAsync"])
def test_a_use_is_told_to_the_allocator_and_no_warning_to_the_script(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, allocator: str
) -> None:
    runtime.allocator = allocator
    told: list[object] = []

    class Row:
        def record_stream(self, stream: object) -> None:
            told.append(stream)
            if allocator == "cudaMallocAsync":
                warnings.warn(
                    "Called record_stream on tensor whose original creation stream ...", stacklevel=1
                )

    monkeypatch.setattr(accelerator, "row_of", lambda storage: Row())
    TorchAccelerator(GPU).uses(torch.UntypedStorage(4), "a stream")
    assert told == ["a stream"]
