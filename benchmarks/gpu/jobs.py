"""What the campaign does on a GPU: each job is a function that gives back figures, run in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MEMOPT = [sys.executable, "-m", "memopt"]
KINDS = ("recompute", "swap-host", "swap-disk", "compress", "mixed")
COPIES = ("swap-host", "swap-disk", "mixed")
"""Those that a late device has something to do with."""
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """`run` returns plain data, and raises where nothing could be found out."""

    part: str
    name: str
    limit_s: float
    run: Callable[[], Found]
    timed: bool = False
    """Must have the machine for itself."""
    words: Callable[[Found], str] = lambda found: str(found)[:300]


def dry() -> bool:
    """Is there no GPU, and everything tiny?"""
    return bool(os.environ.get("MEMOPT_CAMPAIGN_DRY"))


def execute(command: list[str], folder: Path | str, *, may_fail: bool = False) -> tuple[str, str, int]:
    """(stdout, stderr, exit code) of `command`. Raises `RuntimeError` with its last words where it failed."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise RuntimeError(f"{' '.join(command[-6:])} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout, done.stderr, done.returncode


# --- the machine


def environment() -> Found:
    """What doctor says, and what nvidia-smi does."""
    out, _, _ = execute([*MEMOPT, "doctor", "--json"], ROOT)
    smi = subprocess.run("nvidia-smi | head -20; free -g | head -2; df -h /tmp | tail -1; mount | grep -E ' (/tmp|/) '; ulimit -l", shell=True, capture_output=True, text=True, check=False)  # fmt: skip
    return {"doctor": json.loads(out), "machine": smi.stdout}


def calibrate() -> Found:
    """`memopt calibrate`: rates and hidden memory."""
    with tempfile.TemporaryDirectory() as folder:
        out, _, _ = execute([*MEMOPT, "calibrate", "--json"], folder)
        path = Path(folder) / "memopt-calibration.json"
        return {"rates": json.loads(out), "rows": json.loads(path.read_text()) if path.exists() else None}


def links() -> Found:
    """GB/s between pinned memory and the device by size, one way and both ways at once; what pinning costs."""
    import time

    import torch

    if dry():
        return {"left out": "no link without a GPU"}
    found: Found = {}
    out_stream, in_stream = torch.cuda.Stream(), torch.cuda.Stream()

    def rate(work: Callable[[], None], nbytes: int) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return round(nbytes / sorted(times)[2] / 1e9, 2)

    for mib in (1, 4, 16, 64, 256, 1024):
        here = torch.rand(mib << 18, device="cuda")
        begin = time.perf_counter()
        host = torch.empty(mib << 18, pin_memory=True)
        pinned_s = time.perf_counter() - begin
        again, there = torch.empty_like(host, pin_memory=True), torch.empty_like(here)

        def away(host: Any = host, here: Any = here) -> None:
            with torch.cuda.stream(out_stream):
                host.copy_(here, non_blocking=True)

        def back(there: Any = there, again: Any = again) -> None:
            with torch.cuda.stream(in_stream):
                there.copy_(again, non_blocking=True)

        size = mib << 20
        found[f"{mib} MiB"] = {
            "out": rate(away, size),
            "in": rate(back, size),
            "both": rate(lambda away=away, back=back: (away(), back()), 2 * size),
            "pin_ms": round(pinned_s * 1e3, 2),
        }
    big = torch.rand(1 << 28, device="cuda")
    copy = torch.empty_like(big)
    found["on the device"] = rate(lambda: copy.copy_(big), 2 << 30)
    return found


# --- tiers


def tier(which: str) -> Found:
    """2,000 storages of random sizes through a tier while the device computes: each byte back as it was."""
    if not dry():
        return _tier(which)
    from benchmarks.gpu.late import late_device

    with late_device():
        return _tier(which)  # with copies that come late


def _tier(which: str) -> Found:
    import random
    import time

    import torch

    from memopt.enforcers.tiers.per_device import disk_tier, host_tier

    device = "cpu" if dry() else "cuda"
    store = host_tier(1 << 30) if which == "host" else disk_tier(Path(tempfile.gettempdir()))
    draw = random.Random(0)
    load = torch.rand(2048 if not dry() else 64, 2048 if not dry() else 64, device=device)
    held: list[tuple[Any, int, torch.Tensor]] = []
    wrong = moved = 0
    begin = time.perf_counter()
    for number in range(2000 if not dry() else 50):
        torch.mm(load, load)
        size = draw.choice((1, 100, 4096, 70_001, 1 << 20, (5 << 20) + 3))
        generator = torch.Generator(device).manual_seed(number)
        made = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device, generator=generator)
        held.append((store.write_async(made.untyped_storage()), size, torch.tensor([number])))
        del made
        store.collect()
        while len(held) > 40 or (number % 7 == 0 and held):
            ticket, size, seed = held.pop(draw.randrange(len(held)))
            storage = store.take_back(ticket)
            if storage is None:
                storage = torch.UntypedStorage(size, device=device)
                store.read_async(ticket, storage).result()
                moved += size
            again = torch.Generator(device).manual_seed(int(seed))
            expected = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device, generator=again)
            row = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            wrong += not torch.equal(row[:size], expected)
            del ticket, storage, row
    held.clear()
    store.close()
    return {"wrong": wrong, "read_bytes": moved, "seconds": round(time.perf_counter() - begin, 2), "failure": str(store.failure or "")}  # fmt: skip


# --- whole scripts


EXAMPLES = ("char_gpt", "dcgan", "lstm", "resnet", "unet", "vit_amp")
SECOND_DERIVATIVES = ("pinn", "forces", "maml")
SMALL = (
    "resnet50 16 amp-fp16 sgd",
    "mobilenet_v2 16 bf16 sgd",
    "convnext_tiny 16 amp-bf16 adamw-fused",
    "vit 16 amp-bf16 adamw",
    "gpt2 4 bf16 adamw-fused",
    "opt-350m 2 fp32 sgd",
    "llama-3.2-1b 2 bf16 sgd",
    "t5-base 4 amp-bf16 adamw",
)


def script_of(name: str, *, steps: int = 12) -> list[str]:
    """What stands behind `memopt profile`."""
    if dry() and "fp16" not in name:  # whose scaler skips the first steps
        steps = min(steps, 6)
    if name in EXAMPLES:
        from tests.memopt.test_examples import SMALL

        small = SMALL[f"{name}.py"] if dry() else []
        return [str(ROOT / "examples" / f"{name}.py"), "--steps", str(steps), *small]
    tiny = ["--tiny", "--device", "cpu"] if dry() else []
    if name in SECOND_DERIVATIVES:
        return ["-m", "benchmarks.gpu.second_derivatives", name, *tiny, "--steps", str(steps)]
    model, batch, *rest = name.split()
    return ["-m", "benchmarks.gpu.train", model, "2" if dry() else batch, *rest, *tiny, "--steps", str(steps)]


def plans(name: str) -> Found:
    """Profile a script, then plans of each kind that take all they can: predicted and measured peak, the same bits."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        _, err, code = execute([*MEMOPT, "profile", "-o", "run.profile.json.gz", *script_of(name)], folder, may_fail=True)  # fmt: skip
        if not (Path(folder) / "run.profile.json.gz").exists():
            return {"failed": f"no profile, exit {code}: {err[-2000:]}"}
        if code:
            found["profile"] = f"exit {code}: {err[-500:]}"
        printed = execute([sys.executable, *script_of(name)], folder)[0] if dry() else ""
        with ThreadPoolExecutor(1 if dry() else len(KINDS)) as pool:
            found |= dict(zip(KINDS, pool.map(partial(_may_fail, folder=folder, printed=printed), KINDS), strict=True))  # fmt: skip
        if any("error" in each or each.get("verify") != "identical" for each in found.values() if isinstance(each, dict)):  # fmt: skip
            found["failed"] = "see the kinds"
    return found


def _may_fail(kind: str, folder: str, printed: str) -> Found:
    try:
        return _one_plan(kind, folder, printed)
    except RuntimeError as error:
        return {"error": str(error)[-1500:]}


def _one_plan(kind: str, folder: str, printed: str) -> Found:
    """`printed`: what the script prints without memopt; the late device must not change it."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.gpu.everything",
        "run.profile.json.gz",
        kind,
        f"{kind}.plan.json",
    ]
    execute(words, folder)
    memopt = [sys.executable, "-m", "benchmarks.gpu.late"] if dry() and kind in COPIES else MEMOPT
    out, err, code = execute([*memopt, "apply", f"{kind}.plan.json", "--outcome", f"{kind}.json"], folder, may_fail=True)  # fmt: skip
    path = Path(folder) / f"{kind}.json"
    told: Found = {"exit": code}
    if path.exists():
        outcome = json.loads(path.read_text())
        told |= {
            "plain_bytes": outcome["unplanned_peak_bytes"],
            "predicted_bytes": outcome["predicted_peak_bytes"],
            "measured_bytes": outcome["measured_peak_bytes"],
            "step_ms": [round(outcome[f"{each}_step_ms"] or 0, 2) for each in ("plain", "predicted", "measured")],
            "actions": outcome["actions"],
            "notes": outcome["notes"],
        }  # fmt: skip
    if code:
        told["error"] = err[-1500:]
        return told
    moved = re.search(r"the late device moved (\d+) storages", err)
    if moved is not None:
        told["moved"] = int(moved[1])
    if dry():  # what `--verify` starts has no late device: what the script printed is compared instead
        told["verify"] = "identical" if out == printed else "on the late device it printed something else"
        return told
    verify = [*MEMOPT, "apply", f"{kind}.plan.json", "--verify", "3", "--deterministic"]
    out, err, code = execute(verify, folder, may_fail=True)
    told["verify"] = "identical" if code == 0 and out.startswith("identical") else err[-1500:]
    return told


def plan_words(found: Found) -> str:
    words = []
    for kind in KINDS:
        each = found.get(kind)
        if each is None:
            continue
        if each.get("measured_bytes"):
            off = each["measured_bytes"] / each["predicted_bytes"] - 1
            done = each["actions"]
            same = "same" if each.get("verify") == "identical" else "DIFFERS"
            saved = each["measured_bytes"] / each["plain_bytes"]
            words.append(f"{kind} {same} {saved:.0%} ({off:+.1%}) {done['done']}/{done['planned']}")
        else:
            words.append(f"{kind} FAILED {each.get('error', '')[-160:]!r}")
    return "; ".join(words) or str(found)[-400:]


OOM_SCRIPT = """
import torch
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_per_process_memory_fraction(1.2e9 / torch.cuda.get_device_properties(0).total_memory)
model = torch.nn.Sequential(*[m for _ in range(12) for m in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows = 16384 if device == "cuda" else 256
for step in range(4):
    loss = model(torch.randn(rows, 1024, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
"""


def out_of_memory() -> Found:
    """The README's first case: a script that dies, its profile, `--offload`, a plan, and the run that does not die."""
    found: Found = {"left out": "a CPU's memory does not run out: the script ends well"} if dry() else {}
    budget = "min" if dry() else "1.9GB"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(OOM_SCRIPT)
        out, err, code = execute([sys.executable, "train.py"], folder, may_fail=True)
        found["plain"] = [code, out[-100:], err[-300:]]
        _, err, code = execute([*MEMOPT, "profile", "-o", "died.profile.json.gz", "train.py"], folder, may_fail=True)  # fmt: skip
        found["profile"] = [code, err[-900:]]
        out, err, code = execute([*MEMOPT, "show", "died.profile.json.gz"], folder, may_fail=True)
        found["show"] = [code, out[:300], err[-300:]]
        _, err, code = execute([*MEMOPT, "profile", "--offload", "-o", "run.profile.json.gz", "train.py"], folder, may_fail=True)  # fmt: skip
        found["offload"] = [code, err[-900:]]
        _, err, code = execute([*MEMOPT, "advise", "run.profile.json.gz", "--budget", budget, "-o", "plan.json"], folder, may_fail=True)  # fmt: skip
        found["advise"] = [code, err[-900:]]
        out, err, code = execute([*MEMOPT, "apply", "plan.json"], folder, may_fail=True)
        found["apply"] = [code, out, err[-900:]]
        # less by what kernels take that are loaded after the guard has looked: the script's own limit is of the allocator
        least = "60%" if dry() else "1.75GB"
        out, err, code = execute([*MEMOPT, "run", "--budget", least, "train.py"], folder, may_fail=True)  # fmt: skip
        found["run"] = [code, out, err[-900:]]
    if found["apply"][0] != 0:
        found["failed"] = "the run under the plan did not end well"
    return found


def _jobs() -> list[Job]:
    from benchmarks.gpu import headline, recurrent_dropout, replays, runs, steps, workspaces

    part = "correctness"
    return [
        Job(part, "environment", 60, environment, words=lambda f: str(f.get("machine", f))[:1500]),
        Job(part, "calibrate", 60, calibrate),
        *(Job(part, f"tier {which}", 90, partial(tier, which)) for which in ("host", "disk")),
        Job(part, "out of memory", 150, out_of_memory, words=lambda f: json.dumps(f)[:4000]),
        *(
            Job(part, f"plans {name}", 400, partial(plans, name), words=plan_words)
            for name in (*EXAMPLES, *SECOND_DERIVATIVES)
        ),
        *(Job(part, f"replays {dtype}", 300, partial(replays.replays, dtype)) for dtype in replays.DTYPES),
        Job(part, "cudnn attention", 60, replays.attention, words=replays.attention_words),
        *(Job(part, f"plans {name}", 400, partial(plans, name), words=plan_words) for name in SMALL),
        Job(part, "links", 60, links, timed=True),
        *(Job(part, f"recurrent dropout {name}", 120, check) for name, check in recurrent_dropout.checks()),
        *(Job("runs", name, 200, run, words=runs.words) for name, run in runs.runs()),
        *(Job("steps", name, 200, run, True, steps.words) for name, run in steps.runs()),
        Job("workspaces", "convolutions", 200, workspaces.convolutions),
        Job("workspaces", "stages", 60, workspaces.stages, timed=True),
        *(
            Job("headline", name, limit_s, run, True, headline.words)
            for name, limit_s, run in headline.runs()
        ),
    ]


JOBS = {job.name: job for job in _jobs()}
