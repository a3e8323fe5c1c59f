"""Does skipping show on the clock: 9 of 30 blocks forced off, SmolLM2-135M, prefill of 512 tokens at batch 1.

Claim: the step time saved is at least 0.9 of the FLOPs saved (realised fraction). Usage:

    python benchmarks/forced_skip.py [--repeats N]

Exit code 1 if the claim does not hold. Run it on an otherwise idle machine.
"""

from __future__ import annotations

from claims import Claim, exit_code, measured, parser

from analysis.ladder import ladder

LIMIT = 0.9


def main() -> int:
    repeats = parser(__doc__, 15).parse_args().repeats
    cells = ["cells.prefill={batch: [1], length: [512]}", "cells.decode=null"]
    with measured(["name=forced-skip", *cells, "measure.warmup=2"], repeats) as run:
        table = ladder(run)
    forced = table[(table.arm == "forced-30") & table.rung.isin(["flop_skip", "step_time_saved", "realised_fraction"])]
    print(forced[["rung", "variant", "value", "low", "high", "n"]].to_string(index=False))
    (realised,) = forced[forced.rung == "realised_fraction"].itertuples()
    claim = Claim("realised fraction", float(realised.value), LIMIT, at_least=True, n=int(realised.n))
    print(claim)
    return exit_code([claim])


if __name__ == "__main__":
    raise SystemExit(main())
