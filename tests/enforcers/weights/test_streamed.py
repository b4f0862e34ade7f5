"""Frozen weights are streamed: bits, bytes as predicted, and whoever looks, writes, trains them or takes them elsewhere meanwhile."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.advisors.profiles.plan_reader import read_plan
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.verify.digests import digest
from memopt.enforcers.weights.emptied import EmptiedStorage
from memopt.enforcers.weights.watched import WatchedWeights
from memopt.estimators.simulator.weights_streamed import weights_streamed
from memopt.outcome import Outcome
from memopt.plan import Plan, load_plan
from memopt.trace import Trace, load_trace
from tests.enforcers.weights.test_frozen_away import (
    LAYERS,
    LOOKS,
    WEIGHT_BYTES,
    WIDTH,
    Look,
    LoRA,
    checkpoint_of,
    evaluated,
)
from tests.late.late_session import run_late
from tests.support.enforced import enforced, enforced_from, everything, recorded, seeded, state_digests

Between = Callable[[nn.Module], str]


def nothing(model: nn.Module) -> str:
    return ""


def lora(
    steps: int,
    *,
    in_forward: Look = nothing,
    in_between: Look = nothing,
    compute: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> list[str]:
    """As the loop of the weights that are away between forward and backward, but that it looks at them when it is over only."""
    model = nn.Sequential(*[LoRA() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(steps):
        x = torch.randn(512, WIDTH)
        out = model(x) if compute is None else compute(model, x)
        found.append(in_forward(model))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [in_between(model), digest(loss)]
    return found + state_digests(model)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    gc.collect()  # what an earlier test has left in a cycle would be in the profile, to the byte, and gone when the plan is enforced
    return recorded(lora, tmp_path_factory.mktemp("lora"))


def streaming(
    trace: Trace, choose: Callable[[Problem], Decisions] = lambda _: {}, *, ahead: bool = True
) -> Plan:
    """A plan that streams all, with the decisions of `choose` about other tensors."""
    runs = Adviser(trace, allowed((), ())).streamed
    adviser = next(
        each for each in reversed(runs) if each._streams is not None and each._streams.ahead is ahead
    )
    problem = adviser.problem(1)
    return adviser.write(problem, choose(problem), "chosen by a test")


@pytest.fixture(scope="module")
def plan(trace: Trace) -> Plan:
    return streaming(trace)


def exact(outcome: Outcome) -> bool:
    return outcome.measured_peak_bytes == outcome.predicted_peak_bytes


@pytest.mark.parametrize("ahead", [True, False])
def test_the_whole_base_is_away_to_the_byte(trace: Trace, tmp_path: Path, ahead: bool) -> None:
    plan = streaming(trace, ahead=ahead)
    there = 1 if ahead else 0  # at the peak the loss is computed
    assert plan.streamed is not None
    assert plan.streamed.away_bytes == LAYERS * WEIGHT_BYTES
    assert plan.predicted_peak_bytes < plan.unplanned_peak_bytes - (LAYERS - there - 0.1) * WEIGHT_BYTES
    computed, outcome = enforced(lora, plan, tmp_path, 4, measure=True)
    assert computed == seeded(lora, 4)
    assert exact(outcome), outcome
    assert outcome.actions.done == 1
    assert not list(tmp_path.glob("*swap*"))


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_beside_actions_on_other_tensors(trace: Trace, tmp_path: Path, kind: str) -> None:
    plan = streaming(trace, everything(kind))
    assert len(plan.actions) > LAYERS
    computed, outcome = enforced(lora, plan, tmp_path, 4, measure=True)
    assert computed == seeded(lora, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert outcome.measured_peak_bytes is not None
    assert outcome.measured_peak_bytes <= plan.predicted_peak_bytes
    assert outcome.measured_peak_bytes > 0.9 * plan.predicted_peak_bytes


@pytest.mark.parametrize("ahead", [True, False])
def test_an_op_that_is_run_again_holds_its_weight_and_the_next_one(trace: Trace, ahead: bool) -> None:
    run = weights_streamed(trace, "disk", trace.device, 1, ahead=ahead)
    assert run is not None
    plain, changed = trace.ops, run[0].ops
    readers = [op for op in range(trace.op_count) if changed.workspace_bytes[op] > plain.workspace_bytes[op]]
    there = [changed.workspace_bytes[op] - plain.workspace_bytes[op] for op in readers]
    before_others = 2 if ahead else 1  # the last one is the next itself, in backward
    assert there == [before_others * WEIGHT_BYTES] * (LAYERS - 1) + [WEIGHT_BYTES]


def test_a_budget_that_the_base_alone_would_fill(trace: Trace, tmp_path: Path) -> None:
    budget = LAYERS * WEIGHT_BYTES * 13 // 10
    adviser = Adviser(trace, allowed((), ()), time_limit_s=2.0)
    plan = adviser.plan(budget)
    assert plan.streamed is not None
    assert plan.predicted_peak_bytes <= budget
    computed, outcome = enforced_from(lora, plan, tmp_path, 7, begins_after=3)
    assert computed == seeded(lora, 7)
    assert exact(outcome), outcome
    file = tmp_path / "plan.json"
    plan.save(file)
    again = read_plan(load_plan(file), trace)
    assert again.timeline.peak_bytes == plan.predicted_peak_bytes
    assert again.timeline.step_ms == pytest.approx(plan.predicted_step_ms)


def test_none_is_streamed_where_moving_is_denied(trace: Trace) -> None:
    assert Adviser(trace, allowed((), ())).streamed
    assert not Adviser(trace, allowed((), ("swap",))).streamed
    assert not Adviser(
        msgspec.structs.replace(trace, facts=trace.facts | {"create_graph": 1}), allowed((), ())
    ).streamed


def test_a_profile_keeps_which_they_are(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "profile")
    assert len(load_trace(tmp_path / "profile").frozen) == LAYERS == len(trace.frozen)


# --- whoever looks


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whoever_looks_before_backward_and_between_iterations_finds_them(
    plan: Plan, tmp_path: Path, look: Look, sessions: list[WatchedWeights]
) -> None:
    counted = _counted(look, sessions)
    loop = functools.partial(lora, in_forward=counted, in_between=counted)
    _away.clear()
    computed, _ = enforced(loop, plan, tmp_path, 3)
    assert _away[0] >= LAYERS - 2
    sessions.clear()
    assert computed == seeded(loop, 3)


def test_a_dict_of_its_state_needs_no_bytes(
    plan: Plan, tmp_path: Path, sessions: list[WatchedWeights]
) -> None:
    states: list[dict[str, Tensor]] = []

    def saves_the_adapter(model: nn.Module) -> str:
        states.append(model.state_dict())
        counted(model)
        return digest(states.pop()["1.up.weight"])

    counted = _counted(nothing, sessions)
    _away.clear()
    loop = functools.partial(lora, in_between=saves_the_adapter)
    computed, _ = enforced(loop, plan, tmp_path, 3)
    assert _away[0] == LAYERS
    sessions.clear()
    assert computed == seeded(loop, 3)


_away: list[int] = []


def _counted(look: Look, sessions: list[WatchedWeights]) -> Look:
    def looking(model: nn.Module) -> str:
        streamed = sessions[-1].streamed if sessions else None
        empty = streamed.streams.keys() - streamed.here.keys() if streamed is not None else ()
        _away.append(len(empty))
        return look(model)

    return looking


def written_in_between(model: nn.Module) -> str:
    with torch.no_grad():
        model[2].base.weight.mul_(1.01)
        model[3].base.weight.data.add_(0.001)
        torch._foreach_mul_([model[4].base.weight], 0.99)
    return ""


def test_what_is_written_to_is_copied_again(plan: Plan, tmp_path: Path) -> None:
    loop = functools.partial(lora, in_between=written_in_between)
    computed, outcome = enforced(loop, plan, tmp_path, 5, measure=True)
    assert computed == seeded(loop, 5)
    assert outcome.actions.done == 1, outcome.notes


def thawed(steps: int) -> list[str]:
    """Layers are unfrozen one after the other, the last first."""
    model = nn.Sequential(*[LoRA() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        if step >= 3:
            model[LAYERS + 2 - step].base.weight.requires_grad_(True)
        loss = model(torch.randn(512, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return found + state_digests(model)


def test_what_is_trained_later_is_not_streamed_any_more(
    tmp_path: Path, sessions: list[WatchedWeights]
) -> None:
    plan = streaming(recorded(thawed, tmp_path, warmup=1))
    assert plan.streamed is not None
    computed, _ = enforced(thawed, plan, tmp_path, 7)
    assert sessions[0].streamed is not None
    sessions.clear()
    assert computed == seeded(thawed, 7)


def adversarial(steps: int) -> list[str]:
    """A discriminator that is frozen while its generator steps, and a network that always is."""
    layers = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
    generator, discriminator, seen_by = next(layers), next(layers), nn.Sequential(*layers)
    seen_by.requires_grad_(False)
    both = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (discriminator, generator)]
    found = []
    for _ in range(steps):
        for player, optimizer in zip((discriminator, generator), both, strict=True):
            discriminator.requires_grad_(player is discriminator)
            loss = discriminator(seen_by(generator(torch.randn(64, WIDTH)))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(digest(loss))
    return found + state_digests(generator, discriminator, seen_by)


def test_what_is_frozen_for_a_while_stays(tmp_path: Path, sessions: list[WatchedWeights]) -> None:
    trace = recorded(adversarial, tmp_path)
    assert len(trace.frozen) == 2
    computed, _ = enforced(adversarial, streaming(trace), tmp_path, 5)
    streamed = sessions[0].streamed
    assert streamed is not None
    assert streamed.most_used == 2
    sessions.clear()
    assert computed == seeded(adversarial, 5)


def replaced(steps: int) -> list[str]:
    """The base gets other bytes: `data` is set, a module is replaced, weights are loaded, one is cast and back."""
    model = nn.Sequential(*[LoRA() for _ in range(LAYERS)])
    other = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(steps):
        if step == 3:
            model[0].base.weight.data = torch.ones(WIDTH, WIDTH) / WIDTH
        elif step == 4:
            model.load_state_dict(other)
        elif step == 5:
            model[1].base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        elif step == 6:
            model[2].base.to(torch.float64).to(torch.float32)
        loss = model(torch.randn(512, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return found + state_digests(model)


def test_what_is_replaced_or_loaded(plan: Plan, tmp_path: Path) -> None:
    computed, outcome = enforced(replaced, plan, tmp_path, 9)
    assert computed == seeded(replaced, 9)
    assert outcome.actions.done == 1, outcome.notes


def with_a_thread(model: nn.Module) -> str:
    """It reads weights for longer than the call that starts it."""
    go, found = threading.Event(), list[str]()

    def read() -> None:
        go.wait(10)
        found.append(checkpoint_of(model))

    thread = threading.Thread(target=read)
    thread.start()
    model(torch.ones(2, WIDTH))
    go.set()
    thread.join()
    return found[0]


def with_a_child(model: nn.Module) -> str:
    """A forked process, as a DataLoader's worker, that reads them."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, digest(model[3].base.weight).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return file.read()


@pytest.mark.parametrize("look", [with_a_thread, with_a_child], ids=lambda look: look.__name__)
def test_threads_and_children(plan: Plan, tmp_path: Path, look: Look) -> None:
    loop = functools.partial(lora, in_between=look)
    computed, outcome = enforced(loop, plan, tmp_path, 4)
    assert computed == seeded(loop, 4)
    assert outcome.actions.done == 1, outcome.notes


def _bytes_of(storage: torch.UntypedStorage) -> str:
    return hashlib.sha256(ctypes.string_at(storage.data_ptr(), storage.nbytes())).hexdigest()


def storages(model: nn.Module) -> str:
    """All at once, while others compute."""
    held = [each.untyped_storage() for each in model.parameters()]
    model(torch.ones(2, WIDTH))
    return str([*map(_bytes_of, held)])


def filled(model: nn.Module) -> str:
    model[2].base.weight.untyped_storage().fill_(0)
    storage = model[3].base.weight.untyped_storage()
    model(torch.ones(2, WIDTH))
    storage.fill_(1)
    return digest(model(torch.ones(2, WIDTH)))


def by_dlpack(model: nn.Module) -> str:
    capsule = torch.utils.dlpack.to_dlpack(model[2].base.weight.detach())
    model(torch.ones(2, WIDTH))
    return digest(torch.from_dlpack(capsule))


def in_shared_memory(model: nn.Module) -> str:
    model.share_memory()
    return evaluated(model)


HELD: dict[str, Look] = {
    "storages": storages,
    "storages that are filled": filled,
    "a capsule": by_dlpack,
    "memory that processes share": in_shared_memory,
}


@pytest.mark.parametrize("look", HELD.values(), ids=HELD)
@pytest.mark.parametrize("when", ["in_forward", "in_between"])
def test_whoever_has_the_bytes_themselves(plan: Plan, tmp_path: Path, look: Look, when: str) -> None:
    loop = functools.partial(lora, **{when: look})  # type: ignore[arg-type]
    computed, outcome = enforced(loop, plan, tmp_path, 4)
    assert computed == seeded(loop, 4)
    assert outcome.actions.done == 1, outcome.notes


def swapped(model: nn.Module) -> str:
    """What torch refuses for tensors with weak references."""
    one, other = model[1].base.weight, model[2].base.weight
    torch.utils.swap_tensors(one, other)
    return evaluated(model)


def test_two_weights_that_change_places(plan: Plan, tmp_path: Path) -> None:
    loop = functools.partial(lora, in_between=swapped)
    computed, _ = enforced(loop, plan, tmp_path, 4)
    assert computed == seeded(loop, 4)


def test_none_is_streamed_that_a_compiled_region_may_read(plan: Plan, tmp_path: Path) -> None:
    def loop(steps: int) -> list[str]:
        compiled = torch.compile(lambda x: x * 2, backend="eager")
        compiled(torch.ones(2))
        return lora(steps)

    assert not Adviser(recorded(loop, tmp_path), allowed((), ())).streamed
    torch.compiler.reset()
    _, outcome = enforced_from(loop, plan, tmp_path, 6, begins_after=3)
    assert outcome.actions.done == 0
    assert any("compiled" in note for note in outcome.notes), outcome.notes


# --- other loops


def checkpointed(model: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    for layer in model:
        x = checkpoint(layer, x.requires_grad_(), use_reentrant=reentrant)
    return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_scripts_own(tmp_path: Path, reentrant: bool) -> None:
    loop = functools.partial(lora, compute=functools.partial(checkpointed, reentrant=reentrant))
    plan = streaming(recorded(loop, tmp_path))
    computed, outcome = enforced(loop, plan, tmp_path, 4, measure=True)
    assert computed == seeded(loop, 4)
    assert outcome.measured_peak_bytes is not None
    assert abs(outcome.measured_peak_bytes / outcome.predicted_peak_bytes - 1) < 0.1, outcome


class Gated(nn.Module):
    """Several frozen weights in what is one checkpoint, two of which read the same input, so that gradients meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = LoRA()
        self.up, self.gate, self.down = (
            nn.Linear(*shape, bias=False).requires_grad_(False)
            for shape in ((WIDTH, 2 * WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def gated(steps: int, *, reentrant: bool) -> list[str]:
    model = nn.Sequential(*[Gated() for _ in range(3)])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(steps):
        loss = checkpointed(model, torch.randn(64, WIDTH), reentrant=reentrant).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return found + state_digests(model)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_weights_of_a_checkpoint_go_one_by_one(tmp_path: Path, reentrant: bool, ahead: bool) -> None:
    loop = functools.partial(gated, reentrant=reentrant)
    plan = streaming(recorded(loop, tmp_path), ahead=ahead)
    computed, outcome = enforced(loop, plan, tmp_path, 4, measure=True)
    assert computed == seeded(loop, 4)
    if not reentrant:
        assert exact(outcome), outcome
    # of a nested backward the profile does not tell where a node ends
    assert outcome.measured_peak_bytes is not None
    assert 0.9 * outcome.predicted_peak_bytes < outcome.measured_peak_bytes <= outcome.predicted_peak_bytes


class Tied(nn.Module):
    """An embedding whose weight is read again as a matrix, by the module above; and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2048, 256)
        self.convolution = nn.Conv1d(256, 256, 5, padding=2)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(256, 8), nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.up(self.down(x).relu())
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return x @ self.embedding.weight.t()


def tied(steps: int) -> list[str]:
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for step in range(steps):
        tokens = torch.randint(0, 2048, (4, 32))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            with torch.no_grad():
                found.append(digest(model.eval()(tokens[:1])))
            model.train()
        found.append(digest(loss))
    return found + state_digests(model)


def test_a_weight_that_is_used_twice_and_evaluations(tmp_path: Path) -> None:
    plan = streaming(recorded(tied, tmp_path), ahead=False)
    assert plan.streamed is not None
    assert plan.streamed.parameters == 2
    computed, outcome = enforced(tied, plan, tmp_path, 6, measure=True)
    assert computed == seeded(tied, 6)
    assert exact(outcome), outcome


def fails_at_times(steps: int) -> list[str]:
    """An exception in forward, and one in backward, that the script catches."""
    model = nn.Sequential(*[LoRA() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(steps):
        parameter = model[2].up.weight
        hook = parameter.register_hook(_raise) if step == 3 else None
        try:
            out = model[:3](torch.randn(512, WIDTH))
            if step == 2:
                _raise(out)
            optimizer.zero_grad()
            model[3:](out).square().mean().backward()
        except OverflowError:
            found.append("failed")
        if hook is not None:
            hook.remove()
        optimizer.step()
        found.append(digest(out))
    return found + state_digests(model)


def _raise(_: Tensor) -> None:
    raise OverflowError


def test_exceptions_that_a_script_catches(plan: Plan, tmp_path: Path) -> None:
    computed, outcome = enforced(fails_at_times, plan, tmp_path, 6)
    assert computed == seeded(fails_at_times, 6)
    assert outcome.actions.done == 1, outcome.notes


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_on_a_device_whose_copies_come_late(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, ahead: bool
) -> None:
    links = dict.fromkeys(("host_out_bytes_per_s", "host_in_bytes_per_s"), 1e10)
    device = msgspec.structs.replace(trace.device, kind="cuda", **links)
    plan = streaming(msgspec.structs.replace(trace, device=device), ahead=ahead)
    assert plan.streamed is not None
    assert plan.streamed.tier == "host"
    plan = msgspec.structs.replace(plan, device=trace.device)
    held: list[bool] = []
    is_held = functools.partial(_noting, EmptiedStorage.is_held.fget, held)  # type: ignore[attr-defined]
    monkeypatch.setattr(EmptiedStorage, "is_held", property(lambda content: is_held(content)))
    computed, outcome, _, kernels = run_late(lora, plan, tmp_path, 4, monkeypatch, seed)
    assert computed == seeded(lora, 4)
    assert outcome.actions.done == 1, outcome.notes
    assert kernels.noted
    assert held
    assert not any(held)  # a copy in is over, for whoever asks


def _noting(found: Callable[[EmptiedStorage], bool], held: list[bool], content: EmptiedStorage) -> bool:
    held.append(found(content))
    return held[-1]
