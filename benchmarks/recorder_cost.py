"""What recording costs: recorder on against off, SmolLM2-135M decode at batch 8, paired within one run.

Claim: at most 3 % of the step (median of on/off ratios, arms dense and routed). Usage:

    python benchmarks/recorder_cost.py [--repeats N]

Exit code 1 if the claim does not hold. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from profiler import run as running
from profiler.store import Run
from workloads.loading import load

LIMIT = 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8)
    repeats = parser.parse_args().repeats
    spec = load(
        "quickstart",
        [
            "name=recorder-cost",
            "cells.prefill=null",
            "cells.decode={batch: [8], context: [128], new_tokens: 48}",
            "trace=null",
            "measure.warmup=1",
            f"measure.max_repeats={repeats}",
            "measure.target_ci=0.0001",
            "measure.budget_s=900",
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        opened = Run(running.run(spec, Path(folder) / "run"))
        costs = [rule for rule in opened.manifest.rules if rule.rule == 14]
        print(opened.manifest.contention["sentence"])
    print(f"{'arm':14} {'on ÷ off − 1':>12} {'95 % interval':>20} {'pairs':>6}")
    for rule in costs:
        found = rule.figures
        print(f"{rule.arm:14} {found['cost']:>12.2%} [{found['low']:>8.2%}, {found['high']:>8.2%}] {found['n']:>6.0f}")
    worst = max(rule.figures["cost"] for rule in costs)
    print(f"largest {worst:.2%}, limit {LIMIT:.0%}: {'holds' if worst <= LIMIT else 'DOES NOT HOLD'}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
