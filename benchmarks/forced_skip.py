"""Does skipping show on the clock: 9 of 30 blocks forced off, SmolLM2-135M, prefill of 512 tokens at batch 1.

Claim: the step time saved is at least 0.9 of the FLOPs saved (realised fraction). Usage:

    python benchmarks/forced_skip.py [--repeats N]

Exit code 1 if the claim does not hold. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from analysis.ladder import ladder
from profiler import run as running
from profiler.store import Run
from workloads.loading import load

LIMIT = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    spec = load(
        "quickstart",
        [
            "name=forced-skip",
            "cells.prefill={batch: [1], length: [512]}",
            "cells.decode=null",
            "trace=null",
            "measure.warmup=2",
            f"measure.max_repeats={repeats}",
            "measure.target_ci=0.001",
            "measure.budget_s=900",
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        opened = Run(running.run(spec, Path(folder) / "run"))
        print(opened.manifest.contention["sentence"])
        table = ladder(opened)
    forced = table[(table.arm == "forced-30") & table.rung.isin(["flop_skip", "step_time_saved", "realised_fraction"])]
    print(forced[["rung", "variant", "value", "low", "high", "n"]].to_string(index=False))
    realised = float(forced.loc[forced.rung == "realised_fraction", "value"].iloc[0])
    print(f"realised fraction {realised:.3f}, limit {LIMIT}: {'holds' if realised >= LIMIT else 'DOES NOT HOLD'}")
    return 0 if realised >= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
