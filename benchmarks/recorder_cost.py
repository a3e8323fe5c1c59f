"""What recording costs: recorder on against off, SmolLM2-135M decode at batch 8, paired within one run.

Claim: at most 3 % of the step (median of on/off ratios, arms dense and routed). Usage:

    python benchmarks/recorder_cost.py [--repeats N]

Exit code 1 if the claim does not hold. Run it on an otherwise idle machine.
"""

from __future__ import annotations

from claims import Claim, exit_code, measured, parser

LIMIT = 0.03


def main() -> int:
    repeats = parser(__doc__, 8).parse_args().repeats
    cells = ["cells.prefill=null", "cells.decode={batch: [8], context: [128], new_tokens: 48}"]
    with measured(["name=recorder-cost", *cells, "measure.warmup=1"], repeats) as run:
        costs = [rule for rule in run.manifest.rules if rule.rule == 14]
    print(f"{'arm':14} {'on ÷ off − 1':>12} {'95 % interval':>20} {'pairs':>6}")
    for rule in costs:
        found = rule.figures
        print(f"{rule.arm:14} {found['cost']:>12.2%} [{found['low']:>8.2%}, {found['high']:>8.2%}] {found['n']:>6.0f}")
    worst = max(costs, key=lambda rule: rule.figures["cost"]).figures
    claim = Claim("largest", worst["cost"], LIMIT, n=int(worst["n"]), percent=True)
    print(claim)
    return exit_code([claim])


if __name__ == "__main__":
    raise SystemExit(main())
