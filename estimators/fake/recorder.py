"""Record what memory a training step would take, on fake tensors: a dispatch mode that sees storages come and go.

How to use it without a script (an ONNX interpreter, a test):

    with FakeRecorder(target="cuda") as recorder:      # or target="cpu": the CPU run's own operators
        weight = recorder.parameter((4096, 4096), torch.bfloat16)     # leaf, category "parameter"
        x = recorder.fake((8, 4096), torch.bfloat16)                  # category "input"
        optimizer = torch.optim.AdamW([weight])
        for _ in range(3):
            loss = model(x, weight).float().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    recording = recorder.finish()                      # a `Recording`: plain data, no tensors

Inside, tensors carry shapes and no values. Every tensor is a fake *cpu* tensor to C++ (a fake `cuda` tensor cannot run backward
without a GPU); which storages lie on the `cuda` device is kept beside them, by storage, and only those are recorded.
Small integers and small explicit data stay real, so that lengths, indices and schedules keep their values.
Ops that only a value could answer (`.item()`, `x[mask]`) get a guess that is noted; see `fake/values/guess.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal

import torch

from memopt.devices import find_device
from memopt.estimators.fake.gpu.autocast import CudaAutocast
from memopt.estimators.fake.gpu.cuda_ops import device_choices
from memopt.estimators.fake.gpu.graphs import Pools
from memopt.estimators.fake.gpu.streams import Streams
from memopt.estimators.fake.in_place_sums import Meetings
from memopt.estimators.fake.kernels import (
    cudnn,  # noqa: F401  they register formulas
    onednn,  # noqa: F401  they register formulas
)
from memopt.estimators.fake.kernels.blas import BlasWorkspaces
from memopt.estimators.fake.kernels.fused import Fusion
from memopt.estimators.fake.kernels.hidden import hidden_bytes
from memopt.estimators.fake.kernels.probe import Probes
from memopt.estimators.fake.kernels.sparse import note_distinct, sparse_result
from memopt.estimators.fake.ledger import Enough, Ledger, Point
from memopt.estimators.fake.shared_mode import SharedFakeMode
from memopt.estimators.fake.torch_internals import (
    FakeTensor,
    contiguous_strides,
    is_wrapper_type,
    tree_map,
)
from memopt.estimators.fake.values.at_most import note_most
from memopt.estimators.fake.values.choices import Overrides, plain_choices
from memopt.estimators.fake.values.guess import Guesser
from memopt.estimators.fake.values.layouts import as_laid_out
from memopt.estimators.fake.values.mask_share import note_share
from memopt.estimators.fake.values.real import stays_real
from memopt.estimators.fake.values.shapes import Shapes
from memopt.estimators.hidden.hidden_memory import HiddenMemory
from memopt.estimators.recording import Recording, StorageRow, on_fullest
from memopt.instrument.identity import NO_STORAGE, parts_of
from memopt.instrument.nodes import node_of
from memopt.instrument.torch_internals import (
    DisableTorchFunction,
    TorchDispatchMode,
    disable_current_modes,
    is_wrapper,
)

Target = Literal["cuda", "cpu"]


prim_device = torch.ops.prim.device.default
aten = torch.ops.aten


if TYPE_CHECKING:
    from memopt.estimators.fake.watch import Watch


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("key", "nbytes")

    def __init__(self, storage: torch.UntypedStorage, freed: Callable[[_StorageRef], None]) -> None:
        super().__init__(storage, freed)  # type: ignore[call-arg]
        self.key: int = storage._cdata
        self.nbytes: int = storage.nbytes()
        """What its owner says; the row may know of more (a loss reduced in place keeps its elements)."""


class FakeRecorder(Ledger, TorchDispatchMode):
    """Runs every op on fake tensors and keeps the sequence of storages allocated and freed on the target device."""

    def __init__(
        self,
        target: Target = "cuda",
        *,
        hidden: HiddenMemory | None = None,
        guesser: Guesser | None = None,
    ) -> None:
        """`hidden`: of the GPU that is pretended to be there, an A100 unless given."""
        super().__init__()
        self.target = target
        self.hidden = hidden or HiddenMemory.of(find_device("a100-80gb"))
        self.capability = self.hidden.device.capability_pair
        self.fake_mode = SharedFakeMode()
        self.shapes = Shapes(self.fake_mode)
        self.guesser = guesser or Guesser()
        self.probes = Probes()
        self.meetings = Meetings(self)
        self.streams = Streams(self)
        self.pools = Pools(self)
        self.fusion = Fusion(self)
        self.on_stream = self.streams.now
        self.blas = BlasWorkspaces(self)
        self.inside = 0
        self._live: dict[int, tuple[_StorageRef, int]] = {}
        self._unwritten: dict[int, _StorageRef] = {}
        """Of real tensors into which fake ones were written, and of what was made of them."""
        self._claim: str | None = None
        self.backward_bytes: dict[str, int] = {}
        """By device, what ops of backward passes gave back; copies from one to the other are left out."""
        self.watch: Watch | None = None
        self._stack = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Dynamo never runs here: keeping it out of every op would take longer than the op."""
        return False

    # entering and leaving

    def __enter__(self) -> FakeRecorder:
        from memopt.estimators.fake.watch import watching

        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            overrides = Overrides()
            self._stack.callback(overrides.close)
            plain_choices(overrides)
            device_choices(overrides, self)
            if self.target == "cuda":
                self._stack.callback(CudaAutocast(self).close)
            self._stack.enter_context(watching(self))
        except BaseException:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def finish(self, until: Point | None = None) -> Recording:
        """What was recorded, as plain data, up to a point. Storages alive then stay allocated in it."""
        with self.paused():
            self.probes.resolve(self.rows)
        whole = Recording(
            target=self.target,
            **self.told(until),
            notes=self.guesser.notes(),
            bounded=list(self.guesser.bounded),
            memory_fraction=self.memory_fraction,
            aside=list(self.watch.aside) if self.watch is not None else [],
            backward_elsewhere=self.backward_bytes.get("cpu", 0) > self.backward_bytes.get(self.target, 0),
        )
        return on_fullest(whole)

    # making tensors

    def fake(
        self, shape: Iterable[int], dtype: torch.dtype = torch.float32, *, category: str = "input"
    ) -> torch.Tensor:
        """A new fake tensor on the target device."""
        with self.paused(), self.fake_mode:
            made = torch.empty(tuple(shape), dtype=dtype)
        self._see(made, self.target, "made")
        self.mark(made, category)
        return made

    def parameter(self, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
        """A new fake leaf that requires grad, on the target device."""
        return torch.nn.Parameter(self.fake(shape, dtype, category="parameter"))

    @contextmanager
    def claiming(self, device: str, ordinal: int = 0) -> Any:
        """New storages inside lie on `device`, whatever their inputs lie on."""
        before, self._claim, self.ordinal = self._claim, device, ordinal
        try:
            yield
        finally:
            self._claim = before

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Ops inside are recorded although another thread entered the recorder; that one must not run any meanwhile."""
        assert self.watch is not None
        super().__enter__()  # type: ignore[no-untyped-call]
        self.watch.thread = get_ident()
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Any:
        """Ops inside are not seen."""
        self.inside += 1
        try:
            with disable_current_modes():
                yield
        finally:
            self.inside -= 1

    # asking and telling

    def device_of(self, tensor: torch.Tensor) -> str:
        """`cuda` or `cpu`: where the script believes `tensor` to be; of a wrapper, what it was made for."""
        if self.target == "cpu":
            return "cpu"
        told = getattr(tensor, "_memopt_device", None)
        return told or ("cuda" if self._lies_there(tensor) else "cpu")

    def ordinal_of(self, tensor: torch.Tensor) -> int:
        """Which GPU a tensor on one of them lies on."""
        row = self.row_of(tensor)
        return row.ordinal if row is not None else 0

    def _lies_there(self, tensor: torch.Tensor) -> bool:
        """Whether the storage under `tensor` is recorded; of a sparse one, that of its values."""
        try:
            return tensor.untyped_storage()._cdata in self._live
        except NO_STORAGE:
            if tensor.layout is not torch.sparse_coo:
                return False
        with self.paused():
            return tensor._values().untyped_storage()._cdata in self._live

    def mark(self, tensor: torch.Tensor, category: str, label: str = "") -> None:
        """Name the storages under `tensor`; nothing happens when it is not on the target."""
        for row in self.rows_of(tensor):
            row.category = category
            if label:
                row.label = label

    def row_of(self, tensor: torch.Tensor) -> StorageRow | None:
        """What is recorded of the storage under `tensor`, or under the first tensor that it holds."""
        return next(self.rows_of(tensor), None)

    def rows_of(self, tensor: torch.Tensor) -> Iterator[StorageRow]:
        """What is recorded of the storages under `tensor`: of a wrapper, under the tensors that it holds."""
        for part in parts_of(tensor):
            try:
                found = self._live.get(part.untyped_storage()._cdata)
            except NO_STORAGE:
                continue
            if found:
                yield self.rows[found[1]]

    def held(self) -> set[int]:
        """The rows whose storages live."""
        return {row for _, row in self._live.values()}

    def as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor in place of a real one: it takes over what is recorded of the real one's storage."""
        if isinstance(tensor, FakeTensor) or is_wrapper(tensor):
            return tensor
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return tensor
        old = tensor.untyped_storage()
        sizes, strides = tuple(tensor.size()), tuple(tensor.stride())
        if tensor.storage_offset() or old.nbytes() != tensor.numel() * tensor.element_size():
            strides = contiguous_strides(sizes)
        with self.paused(), self.fake_mode:
            made = torch.empty_strided(sizes, strides, dtype=tensor.dtype)
        known = self._live.pop(old._cdata, None)
        if known is not None:
            ref = _StorageRef(made.untyped_storage(), self._freed)
            self._live[ref.key] = (ref, known[1])
        elif self.target == "cpu":
            self._see(made, "cpu", "data")
        return made

    def as_real(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor of the fake one's shape that nobody reads, on the same device: for what cannot become fake."""
        with self.paused():
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        self._see(made, self.device_of(tensor), "data")
        return made

    def adopt(self, tensor: torch.Tensor, device: str) -> None:
        """Record a tensor that was made out of sight."""
        self._see(tensor, device, "adopted")

    # recording

    def _see(self, tensor: torch.Tensor, device: str, op: str) -> None:
        try:
            storage = tensor.untyped_storage()
        except NO_STORAGE:
            if tensor.layout is torch.sparse_coo:
                self._see_sparse(tensor, device, op)
            return
        key = storage._cdata
        if key in self._live:
            self.resized(storage)
            return
        if device != self.target or is_wrapper(tensor):
            return  # what a wrapper holds was seen by itself
        if getattr(tensor, "fake_device", tensor.device).type == "meta":
            return
        if device == "cuda" and not storage.resizable():
            return  # NumPy's, on the host
        self._allocate(storage, op)

    def _see_foreign(self, tensors: list[torch.Tensor]) -> None:
        """What an op reads and no op made counts as what ops make does: memory of NumPy, of a mapped or a shared file."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
                self._see(tensor, "cpu", "data")

    def _see_sparse(self, tensor: torch.Tensor, device: str, op: str) -> None:
        self.guesser.remark("of ops on sparse tensors only results and the largest temporaries are counted")
        with self.paused():
            parts = (tensor._indices(), tensor._values())
        for part in parts:
            self._see(part, device, op)

    def _allocate(self, storage: torch.UntypedStorage, op: str) -> None:
        ref = _StorageRef(storage, self._freed)
        index = self._row(storage.nbytes(), op)
        self.meetings.born(index)
        self._live[ref.key] = (ref, index)
        self._event(index + 1)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Its owner gave memory back, or took more, without an op."""
        known = self._live.get(storage._cdata)
        if known is not None and known[0].nbytes != storage.nbytes():
            self._resized(storage._cdata, known, storage)

    def _resized(self, key: int, known: tuple[_StorageRef, int], storage: torch.UntypedStorage) -> None:
        self._event(-(known[1] + 1))
        known[0].nbytes = storage.nbytes()
        old = self.rows[known[1]]
        index = self._row(storage.nbytes(), old.op, old.category)
        self._live[key] = (known[0], index)
        self._event(index + 1)

    def _freed(self, ref: _StorageRef) -> None:
        known = self._live.pop(ref.key, None)
        if known is not None:
            self._event(-(known[1] + 1))

    def index_of(self, tensor: torch.Tensor) -> int:
        """The row of the storage under `tensor`, which must be recorded."""
        return self._live[tensor.untyped_storage()._cdata][1]

    def born_now(self, result: Any) -> list[tuple[int, int]]:
        """`(row, output)` of the outputs of the op just run that have storages of their own."""
        found = []
        for output, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                known = self._live.get(tensor.untyped_storage()._cdata)
                if known is not None and self.rows[known[1]].birth_op == self.op_count:
                    found.append((known[1], output))
        return found

    # running ops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is prim_device:
            return args[0].fake_device
        kwargs = kwargs or {}
        if func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        if any(is_wrapper_type(each) for each in types):
            return NotImplemented  # a DTensor's op on what it holds comes here again
        tensors = _tensors(args, kwargs)
        device, kwargs = self._device(tensors, kwargs)
        if device == "cuda":
            self.blas.before(func)
        self.inside += 1
        try:
            result = self._run(func, args, kwargs, tensors, device)
        finally:
            self.inside -= 1
        self.op_count += 1
        if self.op_count == self.op_limit:
            raise Enough
        name = func.__name__ if hasattr(func, "__name__") else str(func)
        first_row = len(self.rows)
        into_host = device == "cuda" and args and result is args[0] and not self._lies_there(result)
        if not into_host:
            self._see_all(result[:1] if func is _PACK else result, device, name)
        if self.phase == "backward" and self._claim is None:
            self.backward_bytes[device] = self.backward_bytes.get(device, 0) + _bytes_of(result)
        if self.fusion.depth:
            self.fusion.ran(func, first_row)
        if device == self.target:
            for size in hidden_bytes(self, func, args, kwargs, result):
                self.workspace(size, name)
        return result

    def _see_all(self, result: Any, device: str, name: str) -> None:
        if isinstance(result, torch.Tensor):
            self._see(result, device, name)
        elif isinstance(result, (tuple, list)):
            for each in result:
                self._see_all(each, device, name)

    def _device(self, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        asked = kwargs.get("device")
        if self.target == "cpu":
            return self._claim or "cpu", kwargs
        if kwargs.get("pin_memory"):  # of the host, and refused without a driver
            kwargs = {**kwargs, "pin_memory": False}
        if asked is not None and torch.device(asked).type == "cuda":
            self.ordinal = torch.device(asked).index or 0
            return "cuda", {**kwargs, "device": torch.device("cpu")}
        if self._claim is not None:
            return self._claim, kwargs
        there = next((t for t in tensors if self._lies_there(t)), None)
        if there is None:
            return "cpu", kwargs
        self.ordinal = self.ordinal_of(there)
        return "cuda", kwargs

    def _run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        device: str,
    ) -> Any:
        fakes = any(isinstance(t, FakeTensor) for t in tensors)
        if self.target == "cpu":
            self._see_foreign(tensors)
        if fakes:
            own = args
            if any(map(_needs_stand_in, tensors)):
                args, kwargs = tree_map(self._stand_in, (args, kwargs))
            func = self.meetings.as_run(func, args, kwargs)
            guess = self.guesser.answer(self, func, args, kwargs)
            if guess is not None:
                return guess[0]
            sparse = sparse_result(self, func, args, kwargs)
            if sparse is not None:
                return sparse
            result = _own(func, own, as_laid_out(self, func, args, self.shapes.run(func, args, kwargs)))
            if func._schema.is_mutable:
                self._note_unwritten(*_tensors(own[:1], {}))
            note_share(func, args, result)
            note_most(func, args, result)
            note_distinct(func, own, result)
            return result
        if stays_real(func, args, kwargs, tensors, device):
            unwritten = bool(self._unwritten) and any(map(self._is_unwritten, tensors))
            try:
                result = func(*args, **kwargs)
            except RuntimeError:  # zeros make a singular matrix
                if not unwritten:
                    raise
            else:
                if func is _SCALAR:
                    self.guesser.known(result)
                elif unwritten:
                    self._note_unwritten(*_tensors((result,), {}))
                return result
        with self.fake_mode:
            return _own(func, args, func(*args, **kwargs))

    def _note_unwritten(self, *tensors: torch.Tensor) -> None:
        """Those that are real keep what they had, where something fake is written into them: that is not what the script would find there."""
        for each in tensors:
            if type(each) is torch.Tensor and each.layout is torch.strided:
                ref = _StorageRef(each.untyped_storage(), self._unwritten_freed)
                self._unwritten[ref.key] = ref

    def _unwritten_freed(self, ref: _StorageRef) -> None:
        self._unwritten.pop(ref.key, None)

    def _is_unwritten(self, tensor: torch.Tensor) -> bool:
        try:
            return tensor.untyped_storage()._cdata in self._unwritten
        except NO_STORAGE:
            return False

    def _stand_in(self, value: Any) -> Any:
        """For a real tensor into which a fake one was written, or of a subclass: torch makes fakes of plain leaves only."""
        if not isinstance(value, torch.Tensor) or not _needs_stand_in(value):
            return value
        if node_of(value) is None:
            with self.paused(), DisableTorchFunction():
                return value.as_subclass(torch.Tensor)
        with self.paused(), self.fake_mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)


def _needs_stand_in(tensor: torch.Tensor) -> bool:
    """Whether torch refuses to make a fake tensor of a real one."""
    if isinstance(tensor, FakeTensor):
        return False
    return node_of(tensor) is not None or type(tensor) not in _PLAIN


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SCALAR = aten._local_scalar_dense.default
_PACK = aten._pack_padded_sequence.default
"""Its second result, the batch sizes, lies on the cpu."""


def _bytes_of(result: Any) -> int:
    """Of what an op gives back."""
    if isinstance(result, torch.Tensor):
        return int(result.numel() * result.element_size())
    return sum(map(_bytes_of, result)) if isinstance(result, (tuple, list)) else 0


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found.extend(x for x in arg if isinstance(x, torch.Tensor))
    return found


def _own(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """An in-place op on a real tensor returns that tensor, not the fake copy that was made of it."""
    if not (isinstance(result, torch.Tensor) and args and isinstance(args[0], torch.Tensor)):
        return result
    if args[0] is not result and not isinstance(args[0], FakeTensor) and func._schema.name.endswith("_"):
        return args[0]
    return result
