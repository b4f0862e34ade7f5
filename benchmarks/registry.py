"""Training scripts that use libraries as the registry has them, through profile, estimate, advise and apply on the real command line.

    python -m venv VENV
    VENV/bin/pip install -c constraints.txt transformers datasets trl accelerate peft diffusers timm lightning torch_geometric \
        bitsandbytes torchao -e .
    python -m benchmarks.registry --python VENV/bin/python [--only NAME ...] [--keep FOLDER] [--out FILE]

The scripts lie in `benchmarks/registry_scripts`; their models are small and built from configurations, so that nothing is downloaded. Each
prints its losses to the last bit, and a digest of what it trained. `same`: `profile --keep-running` and `apply` print what the plain run
prints. `words`: what of memopt's went to stderr that should not, a traceback above all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "registry_scripts"
RESULTS = SCRIPTS / "results.json"
_HELPERS = ("told", "words")
_LIMIT_S = 600.0


def names() -> list[str]:
    """The scripts, by name."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in _HELPERS)


class Steps:
    """The commands of one script, each with its stdout and stderr kept in the folder."""

    def __init__(self, python: str, name: str, folder: Path) -> None:
        self.python, self.name, self.folder = python, name, folder
        self.script = str(SCRIPTS / f"{name}.py")
        self.seconds: dict[str, float] = {}
        self.codes: dict[str, int] = {}

    def __call__(self, step: str, *words: str) -> str:
        """Run `python words...`, note how it went and return its stdout."""
        began = time.monotonic()
        out, err = self.folder / f"{step}.out", self.folder / f"{step}.err"
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with out.open("w") as stdout, err.open("w") as stderr:
            try:
                self.codes[step] = subprocess.run(
                    [self.python, *words], cwd=self.folder, env=env, stdout=stdout, stderr=stderr, timeout=_LIMIT_S
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                self.codes[step] = 124
        self.seconds[step] = round(time.monotonic() - began, 1)
        return out.read_text()

    def memopt(self, step: str, *words: str) -> str:
        return self(step, "-m", "memopt", *words)

    def last_words(self, step: str) -> str:
        """What memopt said in `step`, and the last line of a traceback of its own."""
        lines = (self.folder / f"{step}.err").read_text().splitlines()
        return " / ".join(line for line in lines if line.startswith("memopt:"))[-400:]

    def traceback(self, step: str) -> bool:
        return "Traceback (most recent" in (self.folder / f"{step}.err").read_text()


def one(python: str, name: str, folder: Path) -> dict[str, Any]:
    """Take one script through all commands."""
    run = Steps(python, name, folder)
    plain = run("plain", run.script)
    found: dict[str, Any] = {"name": name, "plain": run.codes["plain"]}
    profiled = run.memopt("profile", "profile", "-f", "-o", "p.profile.json.gz", "--keep-running", run.script)
    found["peak"] = _json(run.memopt("show", "show", "p.profile.json.gz", "--json"), "peak_bytes")
    for device in ("cpu", "a100-40gb"):
        told = run.memopt(f"estimate-{device}", "estimate", "--device", device, "--json", run.script)
        found[f"estimate {device}"] = _json(told, "allocated_bytes")
    for budget in ("60%", "min"):
        told = run.memopt("advise", "advise", "-f", "p.profile.json.gz", "-o", "p.plan.json", "--budget", budget, "--json")  # fmt: skip
        found["budget"] = budget
        if run.codes["advise"] != 3:
            break
    found |= {"predicted": _json(told, "predicted_peak_bytes"), "actions": _json(told, "action_count")}
    applied = run.memopt("apply", "apply", "-f", "--outcome", "outcome.json", "p.plan.json")
    outcome = folder / "outcome.json"
    found["measured"] = _json(outcome.read_text() if outcome.exists() else "", "measured_peak_bytes")
    found["same"] = told_in(plain) == told_in(profiled) == told_in(applied) != []
    found["codes"], found["seconds"] = run.codes, run.seconds
    found["tracebacks"] = [step for step in run.codes if run.traceback(step) > run.traceback("plain")]
    found["words"] = {
        step: run.last_words(step) for step, code in run.codes.items() if code and step != "plain"
    }
    return found


def told_in(output: str) -> list[str]:
    """The losses and digests: trainers print seconds besides."""
    return [line for line in output.splitlines() if line.startswith(("step ", "state "))]


def _json(text: str, key: str) -> Any:
    try:
        return json.loads(text).get(key)
    except (ValueError, AttributeError):
        return None


def line(found: dict[str, Any]) -> str:
    """One script's line of the table."""

    def mib(key: str) -> str:
        return f"{found[key] / 2**20:>8.2f}" if found.get(key) else f"{'-':>8}"

    bad = [f"{step} {code}" for step, code in found["codes"].items() if code]
    return (
        f"{found['name']:<24}{mib('peak')}{mib('estimate cpu')}{mib('estimate a100-40gb')} {found['budget']:>4}"
        f"{mib('predicted')}{mib('measured')}  {'same' if found['same'] else 'NOT THE SAME'}"
        f" {' '.join(bad)}{' traceback in ' + ','.join(found['tracebacks']) if found['tracebacks'] else ''}"
    )


def main() -> None:
    """Print one line a script, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", nargs="*", default=names())
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = {row["name"]: row for row in json.loads(args.out.read_text())} if args.out.exists() else {}
    print(f"{'MiB':<24}{'profile':>8}{'est.cpu':>8}{'est.gpu':>8}{'':>5}{'foretold':>8}{'measured':>8}")
    for name in args.only:
        with tempfile.TemporaryDirectory() as made:
            folder = (args.keep / name if args.keep else Path(made)).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            rows[name] = one(args.python, name, folder)
        print(line(rows[name]), flush=True)
        args.out.write_text(json.dumps([rows[key] for key in sorted(rows)], indent=1) + "\n")


if __name__ == "__main__":
    main()
