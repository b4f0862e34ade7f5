"""Estimate from a profile: the recorded iteration as it was, at another batch size, on another GPU, with other allocator settings.

Three methods, and the answer says which. *replayed*: the recorded sequence of storages, through the simulated allocator where
the device has one. *re-traced*: the profile's script on fake tensors, checked against the profile at the recorded batch size.
*scaled*: what is computed from the inputs grows with the batch, the rest stays. Re-tracing comes first where the batch size or
the kind of device changes; scaling and replaying take its place where the script cannot be followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from memopt.devices import DeviceSpec, find_device
from memopt.errors import MemoptError, NotPossibleHere, UsageError
from memopt.estimators.batch_search import largest_batch
from memopt.estimators.elsewhere.batch import recorded_batch, scaled
from memopt.estimators.elsewhere.device import on_cuda
from memopt.estimators.elsewhere.recording import amounts_of, recording_of
from memopt.estimators.elsewhere.retrace import argv_at, retrace, script_changed
from memopt.estimators.estimate import DEFAULT_DEVICE, Estimate, estimate_recording
from memopt.estimators.recording import Recording
from memopt.trace import Trace
from memopt.units import format_bytes

Method = Literal["auto", "retrace", "scale"]

_PASSES = 3
"""Iterations that are replayed through an allocator: its segments settle after the first."""
_RETRACE_OFF = 0.1
"""A re-trace that misses the profile's own peak by more is not believed at another batch size."""
_KIND_ERROR = 0.15
"""CUDA chooses other operators than the CPU that was recorded."""
_WORKSPACE_ERROR = 0.5
"""Workspaces at the peak, of which nobody knows how they grow."""


def estimate_trace(
    trace: Trace,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    alloc_conf: str = "",
    batch_arg: str | None = None,
    method: Method = "auto",
    steps: int = 3,
    timeout_s: float = 600.0,
) -> Estimate:
    """The peak memory of the recorded iteration on `device` (default: where it was recorded) at `batch_size` (default: as recorded).

    `batch_arg` is the script's own flag for the batch size. Raises `NotPossibleHere` where the method asked for cannot do it.
    """
    spec = device_of(trace, device)
    return FromProfile(
        trace, spec, alloc_conf=alloc_conf, flag=batch_arg, method=method, steps=steps, timeout_s=timeout_s
    ).at(batch_size)


def device_of(trace: Trace, name: str | None) -> DeviceSpec:
    """The device called `name`; without a name, the one that the profile was recorded on."""
    if name is not None:
        return find_device(name)
    if trace.device.kind == "cpu":
        return find_device("cpu")
    if "snapshot" in trace.facts:
        return find_device(DEFAULT_DEVICE)  # a snapshot does not name its device
    try:
        return find_device(trace.device.name)
    except UsageError as error:
        raise UsageError(
            f"the profile's device, '{trace.device.name}', is not in the table of devices",
            try_="--device NAME",
        ) from error


@dataclass(slots=True)
class FromProfile:
    """What can be said of a profile's run on a device: `at` a batch size, or at the `largest` that fits."""

    trace: Trace
    device: DeviceSpec
    _: KW_ONLY
    alloc_conf: str = ""
    flag: str | None = None
    """The script's own, for the batch size."""
    method: Method = "auto"
    steps: int = 3
    timeout_s: float = 600.0
    as_recorded: Recording | None = None
    """The script as it was profiled, on fake tensors; None until that was needed."""

    @property
    def same_kind(self) -> bool:
        return (self.trace.device.kind == "cpu") == (self.device.kind == "cpu")

    def at(self, batch_size: int | None) -> Estimate:
        """By the best method that works."""
        batch = self._batch(batch_size)
        new = batch_size if batch_size is not None else batch
        if new == batch and self.same_kind and self.method != "retrace":
            return self.replayed(batch, batch)
        if self.method == "scale":
            return self.replayed(batch, new)
        try:
            return self.retraced(batch, new)
        except MemoptError as error:
            if self.method == "retrace" or isinstance(error, UsageError):
                raise
            found = self.replayed(batch, new)
            reason = f"not re-traced: {error.what}" + (f" ({error.why.splitlines()[0]})" if error.why else "")
            return replace(found, notes=[found.notes[0], reason, *found.notes[1:]])

    def _batch(self, batch_size: int | None) -> int:
        """The recorded batch size; it need not be known where none is asked for."""
        if batch_size is not None and "snapshot" in self.trace.facts:
            raise NotPossibleHere(
                "this profile cannot be estimated at another batch size",
                why=self.trace.partial,
                try_="memopt profile SCRIPT, which records the operators too",
            )
        return recorded_batch(self.trace) if batch_size is not None else 1

    def replayed(self, batch: int, new: int) -> Estimate:
        """The recorded sequence, its sizes scaled when `new` differs from `batch`."""
        trace, spec = self.trace, self.device
        amounts = amounts_of(trace)
        error, method = 0.0, "replayed: the recorded iteration"
        if new != batch:
            amounts = scaled(trace, amounts, batch, new)
            error = min(0.5, 0.04 + 0.02 * abs(math.log2(new / batch)))
            method = f"scaled: the recorded iteration of batch {batch}, what is computed from the inputs times {new}/{batch}"
        if not self.same_kind:
            error += _KIND_ERROR
            method += f"; recorded on a {trace.device.kind}, where other operators run than on {spec.name}"
            if spec.kind != "cpu":
                amounts = on_cuda(trace, amounts, spec)
        on_cpu = spec.kind == "cpu"
        recording = recording_of(
            trace,
            amounts,
            target="cpu" if on_cpu else "cuda",
            passes=1 if on_cpu or trace.partial else _PASSES,
        )
        found = estimate_recording(
            recording,
            spec,
            alloc_conf=self._settings(),
            partial=bool(trace.partial),
            context_bytes=self._measured_context(),
        )
        if new != batch:
            error += _WORKSPACE_ERROR * found.by_category.get("workspace", 0) / max(found.allocated_bytes, 1)
        exact = on_cpu and self.same_kind and new == batch
        bars = {"allocated": 0.0} if exact else _wider(found, error)
        notes = [
            method,
            *([f"the profile is partial: {trace.partial}"] if trace.partial else []),
            *found.notes,
        ]
        return replace(
            found, error=bars, notes=notes, left_out=_left_out(found), method=method.partition(":")[0]
        )

    def _settings(self) -> str:
        """The allocator settings asked for, else those of the recorded run."""
        recorded = self.trace.device.allocator
        return self.alloc_conf or (recorded if ":" in recorded else "")

    def _measured_context(self) -> int | None:
        """Bytes of the context, where the profile is of this very device."""
        device = self.trace.device
        if not device.context_bytes or not self.same_kind:
            return None
        try:
            same = find_device(device.name).name == self.device.name
        except UsageError:
            same = False
        return device.context_bytes if same else None

    def retraced(self, batch: int, new: int) -> Estimate:
        """The script at the batch size `new` on fake tensors. Raises `MemoptError` when that cannot be believed, `UsageError`
        where the flag for the batch size changes nothing."""
        argv = argv_at(self.trace, batch, new, self.flag)
        recording, partial = self._followed(argv)
        if self.flag and new != batch and _alike(recording, self._as_recorded(argv, recording)):
            raise UsageError(
                f"{self.flag} does not set the script's batch size",
                why=f"{' '.join(argv)} allocates the same on fake tensors as without it",
                try_="the flag that does, or leave --batch-arg out",
            )
        found = estimate_recording(recording, self.device, alloc_conf=self._settings(), partial=partial)
        notes = [f"re-traced: {' '.join(argv)} on fake tensors"]
        off = self._off(argv, recording, notes)
        bars = {name: round(max(share, off), 3) for name, share in found.error.items()}
        if script_changed(self.trace):
            notes.append("the script's file has changed since the profile was recorded")
        return replace(found, error=bars, notes=[*notes, *found.notes], method="re-traced")

    def _followed(self, argv: list[str]) -> tuple[Recording, bool]:
        return retrace(self.trace, argv, self.device, steps=self.steps, timeout_s=self.timeout_s)

    def _as_recorded(self, argv: list[str], recording: Recording) -> Recording:
        """The run with the profile's own arguments; `recording` is that with `argv`, which may be the same."""
        if self.as_recorded is None:
            own = self.trace.script.argv
            self.as_recorded = recording if argv == own else self._followed(list(own))[0]
        return self.as_recorded

    def _off(self, argv: list[str], recording: Recording, notes: list[str]) -> float:
        """By what share fake tensors miss the profile's peak where both can be had: at the recorded batch, on its kind of device."""
        if not self.same_kind:
            notes.append(f"the profile was recorded on a {self.trace.device.kind}: not compared with it")
            return 0.0
        peak_bytes, _ = self._as_recorded(argv, recording).peak()
        off = abs(peak_bytes / max(self.trace.peak_bytes, 1) - 1)
        if off > _RETRACE_OFF and self.method != "retrace":
            raise NotPossibleHere(
                "fake tensors miss the profile's own peak",
                why=f"they are {off:.0%} off {format_bytes(self.trace.peak_bytes)} at the recorded batch size",
            )
        notes.append(f"at the recorded batch size fake tensors give {off:.1%} off the profile's peak")
        return off

    def largest(
        self, say: Callable[[str], None], instead: Callable[[Estimate], str] = lambda smallest: ""
    ) -> Estimate:
        """The estimate of the largest batch that fits: found by scaling, then checked by re-tracing where that works. Raises
        `NotPossibleHere` as `largest_batch` does."""
        batch = self._batch(1)
        size, found = largest_batch(lambda new: self.replayed(batch, new), say, instead=instead)
        if self.method == "scale":
            return self._named(size, found, say)
        try:
            size, found = largest_batch(lambda new: self.retraced(batch, new), say, size, instead=instead)
        except MemoptError as error:
            if self.method == "retrace":
                raise
            found = replace(found, notes=[*found.notes, f"not checked by re-tracing: {error.what}"])
        return self._named(size, found, say)

    def _named(self, size: int, found: Estimate, say: Callable[[str], None]) -> Estimate:
        text = f"the largest batch that fits is {size}"
        say(text)
        return replace(found, notes=[text, *found.notes])


def _alike(one: Recording, other: Recording) -> bool:
    """Whether both allocate the same, as far as the shorter one goes: one may have been followed for longer."""
    return all(a.size_bytes == b.size_bytes for a, b in zip(one.rows, other.rows, strict=False))


def _wider(found: Estimate, error: float) -> dict[str, float]:
    """The error bars with `error` more; the context's own uncertainty does not grow."""
    share = found.reserved_bytes / max(found.process_bytes or 0, found.reserved_bytes, 1)
    more = {"allocated": error, "reserved": error, "process": error * share}
    return {name: round(bar + more[name], 3) for name, bar in found.error.items()}


def _left_out(found: Estimate) -> list[str]:
    return [
        *found.left_out,
        "whatever other iterations do (evaluation, checkpoints, other lengths of the data)",
    ]
