#!/usr/bin/env bash
# profile -> advise -> apply on one example, in a folder of its own: `make demo`
set -euo pipefail

script=$(cd "$(dirname "$0")" && pwd)/${1:-char_gpt.py}
steps=8
folder=$(mktemp -d "${TMPDIR:-/tmp}/memopt-demo.XXXXXX")
trap 'rm -rf "$folder"' EXIT
cd "$folder"

run() {
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
}

echo "An unchanged script: recorded, planned for 60 % of its memory, run with the plan, and compared with itself bit for bit."
run memopt profile -o run.profile.json.gz "$script" --steps "$steps"
run memopt advise run.profile.json.gz --budget 60% -o run.plan.json --top 4
run memopt apply run.plan.json --outcome outcome.json
run memopt apply run.plan.json --verify 3

python - <<'END'
import json

outcome = json.load(open("outcome.json"))


def row(name, unplanned, predicted, measured, unit, scale):
    print(f"  {name:<12}{unplanned / scale:>10.1f}{predicted / scale:>12.1f}{measured / scale:>12.1f}  {unit}")


print(f"\n  {'':<12}{'unplanned':>10}{'predicted':>12}{'measured':>12}")
peaks = (outcome[f"{kind}_peak_bytes"] for kind in ("unplanned", "predicted", "measured"))
times = (outcome[f"{kind}_step_ms"] for kind in ("plain", "predicted", "measured"))
row("peak", *peaks, "MiB", 2**20)
row("step", *times, "ms", 1)
print(f"  budget      {outcome['budget_bytes'] / 2**20:>10.1f}{'':>24}  MiB")
END
