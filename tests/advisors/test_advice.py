"""Strategies that advise on the run as a whole: figures by hand, exit codes, and what `apply` makes of their plans."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memopt.advisors.advise import advise
from memopt.advisors.counsel.buffer_sharing import BufferSharing, static_layout
from memopt.advisors.counsel.cdma import Cdma
from memopt.advisors.counsel.ctdr import RANK, Ctdr, decomposable
from memopt.advisors.counsel.in_place import in_place
from memopt.advisors.counsel.megatron import Megatron, Transformer
from memopt.advisors.counsel.zero_offload import (
    HOST_BYTES_PER_S,
    Offloaded,
    ZeroOffload,
    after_the_updates_ms,
)
from memopt.advisors.graphs.graph import Graph, decode_graph
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.max_batch import largest
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.registry import counsel, counsels, graph_strategies, registered, strategy
from memopt.cli.main import run
from memopt.cli.shared.plan_here import prepare_run
from memopt.device import Device
from memopt.errors import BadFile, BudgetInfeasible, NotPossibleHere, UsageError
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.plan import Plan, ScriptAction, load_plan
from memopt.trace import CATEGORIES, PHASES, Csr, Trace
from tests.support.layers_trace import Layer, build, chain

MIB = 1 << 20
GPU = Device(kind="cuda", name="a GPU", host_out_bytes_per_s=2e9, host_in_bytes_per_s=1e9)


def problem_of(trace: Trace, budget: int = 1 << 40) -> Problem:
    view = TraceView(trace)
    return Problem(view, Simulator(view), budget, DEFAULT_ALLOW, margin=0.0)


def relabelled(trace: Trace, labels: dict[int, str], kinds: dict[int, str] | None = None) -> Trace:
    """`trace` with other labels (which tell shapes) and categories of storages."""
    column, strings = list(trace.storages.label), list(trace.strings)
    for storage, label in labels.items():
        strings.append(label)
        column[storage] = len(strings) - 1
    category = list(trace.storages.category)
    for storage, kind in (kinds or {}).items():
        category[storage] = CATEGORIES.index(kind)
    storages = msgspec.structs.replace(trace.storages, label=column, category=category)
    return msgspec.structs.replace(trace, storages=storages, strings=strings)


# --- the registries


def test_no_name_is_taken_twice() -> None:
    names = [each.name for each in registered()]
    assert len(names) == len(set(names))
    for name in ("auto", "autoswap", "cdma", "lru"):
        with pytest.raises(ValueError, match=name):
            strategy(name, paper="", needs="", allows=frozenset())
    with pytest.raises(ValueError, match="cdma"):
        counsel(Cdma)


@pytest.mark.parametrize("name", [*counsels(), "magic"])
def test_the_python_door_says_who_does_not_plan(name: str) -> None:
    with pytest.raises(UsageError):
        advise(build(chain([640] * 3)), budget_bytes=1000, strategy=name)


@pytest.mark.parametrize("name", graph_strategies())
def test_what_is_listed_is_what_it_does(name: str) -> None:
    """Every kind that it is said to choose is chosen on some chain at some budget, and no other is."""
    done: set[str] = set()
    for ms, share in itertools.product((1, 40), (0.9, 0.75, 0.6)):
        graph = chain_graph(ms)
        budget = int(share * unplanned_peak(graph))
        with contextlib.suppress(BudgetInfeasible):
            plan = plan_graph(graph, budget, strategy=name, out_gbps=1, in_gbps=1, time_limit_s=0.3)
            done |= {"recompute"} if plan.reruns else set()
            done |= {"swap"} if plan.swaps else set()
    assert done == graph_strategies()[name].graph_kinds


def chain_graph(ms: int) -> Graph:
    """Ten layers, of which each second one takes `ms`; each output is read by the next layer and by its own backward."""
    tensors = [{"id": t, "bytes": 20 * MIB} for t in range(20)]
    forward = [
        {
            "name": "conv" if i % 2 else "relu",
            "ms": 1 + (ms - 1) * (i % 2),
            "reads": [i - 1] if i else [],
            "writes": [i],
        }
        for i in range(10)
    ]
    backward = [
        {"name": "back", "ms": 5, "reads": [19 - k] + ([k - 1] if k > 10 else []), "writes": [k]}
        for k in range(10, 20)
    ]
    rows = {
        "schema": "memopt.graph/1",
        "name": "chain",
        "tensors": tensors,
        "ops": forward + backward,
        "keep": [19],
    }
    return decode_graph(json.dumps(rows).encode())


# --- buffer sharing


def test_the_arena_of_a_chain_is_what_lives_at_once() -> None:
    trace = build(chain([640] * 6), state=1024)
    layout, blocks = static_layout(trace)
    # parameter, input (10 bytes, on a line of 64), six outputs, one gradient at the first backward op
    assert layout.lower_bound_bytes == 1024 + 64 + 6 * 640 + 640
    assert layout.peak_bytes == layout.lower_bound_bytes
    assert blocks == 2 + 12


def test_a_dying_input_could_be_written_over() -> None:
    """Nobody saves the output of layer 1, which layer 2 (exp) reads last; and backward multiplies with the two that are saved."""
    layers = [Layer(640, reads=(-1,)), Layer(640, reads=(0,), saves=()), Layer(640, reads=(1,))]
    found = in_place(TraceView(build(layers)))
    assert (found.ops, found.bytes_each_step) == (3, 3 * 640)


def test_on_a_cpu_it_reports_and_changes_nothing() -> None:
    trace = build(chain([640] * 6))
    advice = BufferSharing().study(problem_of(trace), frozenset())
    assert advice.actions == ()
    assert advice.peak_bytes == trace.peak_bytes
    assert "On a CPU nothing of it can be changed" in advice.verdict


def test_the_setting_that_helps_becomes_an_action() -> None:
    """Sizes that do not fill their segments: what expandable segments are for."""
    sizes = [(11 + 3 * (i % 5)) * MIB + MIB // 2 for i in range(24)]
    advice = BufferSharing().study(problem_of(build(chain(sizes), device=GPU)), frozenset())
    (action,) = advice.actions
    assert action.variables == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    default = advice.figures["reserved_bytes default"]
    best = advice.figures["reserved_bytes expandable_segments:True"]
    assert action.saved_bytes == int(default) - int(best) > 0
    assert advice.figures["lower_bound_bytes"] <= advice.peak_bytes == best


# --- apply


def plan_with(*actions: ScriptAction) -> Plan:
    trace = build(chain([640] * 3))
    return Plan(
        memopt="0", created="", script=trace.script, device=trace.device, profile="", strategy="", budget_bytes=1,
        unplanned_peak_bytes=1, predicted_peak_bytes=1, plain_step_ms=1, predicted_step_ms=1, actions=[],
        script_actions=list(actions),
    )  # fmt: skip


def test_apply_sets_what_the_plan_sets_unless_the_user_did() -> None:
    action = ScriptAction(kind="allocator", what="x", why="y", saved_bytes=1, variables={"PYTORCH_ALLOC_CONF": "a:b"})  # fmt: skip
    environment: dict[str, str] = {}
    assert prepare_run(plan_with(action), environment) == ["PYTORCH_ALLOC_CONF=a:b, as planned"]
    assert environment == {"PYTORCH_ALLOC_CONF": "a:b"}
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "mine:1"}
    assert prepare_run(plan_with(action), environment) == ["kept your allocator settings, mine:1"]
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "mine:1"}


@pytest.mark.parametrize("kind", ["optimizer", "model"])
def test_apply_refuses_mere_advice(kind: Any) -> None:
    with pytest.raises(NotPossibleHere, match="advises but cannot do"):
        prepare_run(plan_with(ScriptAction(kind=kind, what="x", why="y", saved_bytes=1)), {})


@pytest.mark.parametrize(
    "action",
    [
        ScriptAction(kind="allocator", what="x", why="y", saved_bytes=1, variables={"LD_PRELOAD": "evil.so"}),
        ScriptAction(kind="model", what="x", why="y", saved_bytes=1, variables={"PYTORCH_ALLOC_CONF": "a:b"}),
    ],
)
def test_a_plan_sets_nothing_else(action: ScriptAction, tmp_path: Path) -> None:
    plan_with(action).save(tmp_path / "plan.json")
    with pytest.raises(BadFile):
        load_plan(tmp_path / "plan.json")


# --- ZeRO-Offload


def stepped(device: Device) -> Trace:
    """Two layers, a parameter of 4000 bytes, a state of 10, a gradient that the only backward op makes; then one optimizer op."""
    trace = build([Layer(400, reads=(-1,)), Layer(400, reads=(0,))], state=4000, device=device)
    phases = [*trace.ops.phase[:-1], PHASES.index("optimizer")]
    trace = msgspec.structs.replace(trace, ops=msgspec.structs.replace(trace.ops, phase=phases))
    # storage 1 (the input, 10 bytes) as the state; storage 5 is the gradient of the last layer, born at op 2
    return relabelled(trace, {}, {1: "optimizer state", 5: "gradient"})


def test_state_and_gradients_leave_the_device() -> None:
    trace = stepped(GPU)
    advice = ZeroOffload().study(problem_of(trace), frozenset())
    assert advice.figures["state_bytes"] == 10
    assert advice.figures["gradient_bytes"] == 400
    # at op 2: the parameter, both outputs and the gradient that is made there; without the state
    assert advice.peak_bytes == 4000 + 2 * 400 + 400 == trace.peak_bytes - 10
    update_ms = (2 * 10 + 3 * 4000) / HOST_BYTES_PER_S * 1000
    assert advice.figures["host_update_ms"] == pytest.approx(update_ms)
    assert advice.figures["back_ms"] == pytest.approx(4000 / 1e9 * 1000)
    # the gradient is whole at the end of backward, 4 ms; its copy is late by itself
    assert advice.figures["late_ms"] == pytest.approx(400 / 2e9 * 1000)
    assert advice.figures["step_ms"] == pytest.approx(6 - 2 + 400 / 2e6 + update_ms + 4000 / 1e6)
    assert not advice.enforced


def test_a_parameter_comes_back_while_the_next_is_updated() -> None:
    """Updates end at 2, 4 and 8 ms. At 1 ms a byte the copies end at 3, 5 and 10; at 4 ms a byte at 6, 10 and 18."""
    assert after_the_updates_ms([1, 1, 2], 8.0, lambda size: 1.0 * size) == pytest.approx(2)
    assert after_the_updates_ms([1, 1, 2], 8.0, lambda size: 4.0 * size) == pytest.approx(10)
    assert after_the_updates_ms([], 8.0, lambda size: 1.0) == 0


def test_two_optimizers_step_each_at_its_time() -> None:
    """As a GAN's: ops of 1, 1, 2 and 2 ms, the second and the last of them steps. What runs between them is not a step's."""
    trace = stepped(GPU)
    forward, _, backward, step = trace.ops.phase
    trace = msgspec.structs.replace(
        trace, ops=msgspec.structs.replace(trace.ops, phase=[forward, step, backward, step])
    )
    advice = ZeroOffload().study(problem_of(trace), frozenset())
    assert advice.peak_bytes == trace.peak_bytes - 10
    host_ms = sum(float(advice.figures[name]) for name in ("late_ms", "host_update_ms", "back_ms"))
    assert advice.figures["step_ms"] == pytest.approx(6 - (1 + 2) + host_ms)


def test_gradients_kept_from_step_to_step_are_away_and_copied_too() -> None:
    """With `zero_grad(set_to_none=False)` the gradient is there from the beginning; ZeRO-Offload has it from its first write on."""
    trace = stepped(GPU)
    birth = [-1 if storage == 5 else op for storage, op in enumerate(trace.storages.birth_op)]
    trace = msgspec.structs.replace(trace, storages=msgspec.structs.replace(trace.storages, birth_op=birth))
    problem = problem_of(trace)
    found = Offloaded(problem, lambda size: size / 100, lambda size: 0.0)
    assert found.late_ms == pytest.approx(4)
    assert (problem.plain.high_bytes - found.high).tolist() == [10 + 400, 10 + 400, 10, 10]


def test_frozen_parameters_stay_where_they_are() -> None:
    trace = stepped(GPU)
    writes = Csr.of([*(trace.ops.writes.row(op) for op in range(3)), [0]])
    trace = msgspec.structs.replace(trace, ops=msgspec.structs.replace(trace.ops, writes=writes))
    trace = relabelled(trace, {}, {4: "parameter"})
    assert ZeroOffload().study(problem_of(trace), frozenset()).figures["parameter_bytes"] == 4000


def test_there_is_nothing_to_offload_on_a_cpu() -> None:
    with pytest.raises(NotPossibleHere):
        ZeroOffload().study(problem_of(stepped(Device(kind="cpu"))), frozenset())


# --- cDMA


def test_a_compressing_link_never_takes_longer() -> None:
    relu = [Layer(8 * MIB, 3.0, (i - 1,), op="aten.relu.default", grad=MIB, backward_ms=3) for i in range(8)]
    advice = Cdma().study(problem_of(build(relu, device=GPU)), frozenset())
    steps = [advice.figures[f"step_ms {ratio}"] for ratio in ("1", "2.6", "13.8")]
    assert steps[0] > steps[1] > steps[2]
    # every output but the last, which is wanted at once
    assert advice.figures["compressible_bytes"] == 7 * 8 * MIB
    assert not advice.enforced


# --- Megatron


GPT3 = Transformer(
    layers=96, width=12288, heads=96, feed_forward=4 * 12288, vocabulary=51200, table_rows=51200 + 2048, length=2048, batch=1,
    item_bytes=2, fused=False, dropout=True,
)  # fmt: skip


def test_the_published_figures_of_gpt3() -> None:
    """174.6 billion parameters (Narayanan et al., table 1); with the layers recomputed 4 forwards, 3 of the logits: formula (3)."""
    assert (GPT3.layer_parameters + GPT3.table_rows * GPT3.width) / 1e9 == pytest.approx(174.6, abs=0.1)
    b, s, layers, h, v = 1, 2048, 96, 12288, 51200
    formula = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert 4 * GPT3.forward_flops - 2 * b * s * h * v == pytest.approx(formula)


def test_the_published_activations_of_a_layer() -> None:
    """s b h (34 + 5 a s / h), Korthikanti et al., equation (1)."""
    s, h, a = 2048, 12288, 96
    assert GPT3.activation_bytes / 96 == pytest.approx(s * h * (34 + 5 * a * s / h))


def test_a_net_that_is_no_transformer_is_refused() -> None:
    with pytest.raises(NotPossibleHere):
        Megatron().study(problem_of(build(chain([640] * 4))), frozenset())


# --- CTDR


def linear(batch: int) -> Trace:
    trace = build([Layer(batch * 64 * 4, op="aten.addmm.default")] * 3, state=64 * 64 * 4)
    return relabelled(trace, {0: "Net.weight · 64×64 fp32", 2: f"Net.0 · out · {batch}×64 fp32"})


def test_a_matrix_in_two_factors_by_hand() -> None:
    (layer,) = decomposable(TraceView(linear(8)))
    rank = round(RANK * 64)
    assert layer.fewer_weights == 64 * 64 - 2 * 64 * rank
    assert layer.more_bytes == 8 * rank * 4


def test_ctdr_counts_what_activations_grow_by() -> None:
    advice = Ctdr().study(problem_of(linear(8)), frozenset({"model-change"}))
    trace = linear(8)
    # the parameter alone: no gradients and no state lie beside it
    assert advice.figures["peak_bytes_kept"] == trace.peak_bytes - 2048 * 4 + 512
    assert not advice.enforced


def test_ctdr_is_not_for_layers_whose_activations_outweigh_them() -> None:
    with pytest.raises(NotPossibleHere):
        Ctdr().study(problem_of(linear(1024)), frozenset({"model-change"}))


def test_ctdr_must_be_asked_for() -> None:
    with pytest.raises(UsageError, match="changes the model"):
        Ctdr().study(problem_of(linear(8)), frozenset())


# --- the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    build(chain([64000] * 10)).save(tmp_path / "cpu.profile.json.gz")
    sizes = [(11 + 3 * (i % 5)) * MIB + MIB // 2 for i in range(24)]
    build(chain(sizes), device=GPU).save(tmp_path / "gpu.profile.json.gz")
    linear(8).save(tmp_path / "linear.profile.json.gz")
    return tmp_path


def test_a_report_needs_no_budget_and_writes_no_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["advise", "cpu.profile.json.gz", "--strategy", "buffer-sharing", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["figures"]["static_bytes"] == figures["figures"]["lower_bound_bytes"]
    assert not list(folder.glob("*.plan.json"))


def test_a_budget_that_layout_cannot_meet_ends_with_3(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["advise", "cpu.profile.json.gz", "--strategy", "buffer-sharing", "--budget", "50%"]) == 3
    said = capsys.readouterr()
    assert "static arena" in said.out
    assert "smallest peak found" in said.err


def test_a_setting_that_helps_is_a_plan_that_can_be_applied(folder: Path) -> None:
    assert run(["advise", "gpu.profile.json.gz", "--strategy", "buffer-sharing"]) == 0
    plan = load_plan(folder / "memopt-train.plan.json")
    assert plan.actions == []
    assert [each.kind for each in plan.script_actions] == ["allocator"]
    assert run(["show", "memopt-train.plan.json"]) == 0


def test_advice_with_nothing_to_apply_claims_no_refusal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["advise", "linear.profile.json.gz", "--strategy", "buffer-sharing", "-o", "b.json"]) == 0
    assert load_plan(folder / "b.json").script_actions == []
    assert "the plan holds no action" in capsys.readouterr().err


def test_advice_is_written_only_when_asked_and_never_applied(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["advise", "linear.profile.json.gz", "--strategy", "ctdr"]
    assert run(asked) == 2
    assert run([*asked, "--allow", "model-change"]) == 0
    assert not list(folder.glob("*.plan.json"))
    assert run([*asked, "--allow", "model-change", "-o", "c.plan.json"]) == 0
    assert "apply refuses this plan" in capsys.readouterr().err
    assert [each.kind for each in load_plan(folder / "c.plan.json").script_actions] == ["model"]
    assert run(["apply", "c.plan.json"]) == 1


def test_advice_needs_what_it_speaks_of(folder: Path) -> None:
    assert run(["advise", "cpu.profile.json.gz", "--strategy", "megatron"]) == 1
    assert run(["advise", "cpu.profile.json.gz", "--strategy", "zero-offload", "--deny", "optimizer"]) == 2


def test_the_search_for_a_batch() -> None:
    assert largest(lambda size: size <= 37) == (37, 38)
    assert largest(lambda size: size <= 1000) == (1000, 1001)
    # 512 and not 1024, then halves: 768, 896, 960, 992, 1008 (not), 1000: the gap is less than a 64th
    assert largest(lambda size: size <= 1000, share=1 / 64) == (1000, 1008)
    assert largest(lambda size: False) == (0, 1)
