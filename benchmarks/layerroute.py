"""LayerRoute on the clock: what router and bookkeeping cost, and how much of the skipped work turns into time saved.

SmolLM2-135M in float32, arms interleaved, two runs. The first: `dense` and `open`, the router asked in every layer and
every gate open, no LoRA. The second: `dense`; `shared`, 9 of 30 blocks forced off for the whole batch; `random`, as
many for each request by itself; `trained`, the checkpoint that ships. Claims:

1. router and bookkeeping take at most 1.5 % of the step, in every cell;
2. `shared` realises at least 0.95 of the FLOPs it skips in prefill of 512 tokens, and 0.9 in decode at batch 1 and 8.

How claim 1 is judged: median of `open` ÷ `dense` − 1 over pairs of bare steps, of the same repeat and index and so a
second apart at most, through which drift of the machine's pace cancels. It has everything in it: pooling and products
of the router, the wait for its decision, the cache layers' own books, Python. The router and dispatch segments of
instrumented steps of `open` are printed beside it, as a share of the step, and judge nothing: they hold the recorder's
own work on decisions, and miss what lies outside of them. 1.5 % is little beside the noise of a step, so these two arms
have a run of their own, with many pairs; where the interval still holds the limit, the line says so.

For `random` and `trained`, whose rows part in a batch, the realised fraction is printed beside the union effect: rows
that ran, weights read for them, and the share of (layer, step) that some rows run and others skip. Not judged. Usage:

    python benchmarks/layerroute.py [--repeats N]

Exit code 1 if a claim does not hold. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from claims import Claim, exit_code, measured, parser

from analysis import kernels
from analysis.ladder import ladder
from analysis.sharing import sharing
from profiler.checkpoints import builtin_checkpoints
from profiler.intervals import CONFIDENCE, RESAMPLES, Interval
from profiler.store import Run

ROUTER_LIMIT = 0.015
REALISED_LIMIT = {"prefill": 0.95, "decode": 0.9}
DENSE = "{name: dense, method: dense}"
OPEN = "{name: open, method: layerroute, gates: open, lora: false}"
SKIPPING = [
    "{name: shared, method: layerroute, gates: {forced: {ratio: 0.3, seed: 0, pattern: shared}}}",
    "{name: random, method: layerroute, gates: {forced: {ratio: 0.3, seed: 0, pattern: random}}}",
]
TRAINED = "{name: trained, method: layerroute, checkpoint: builtin}"


def router(run: Run) -> list[Claim]:
    """Claim 1, a line a cell."""
    segments, steps = kernels.segments(run), run.frame("steps")
    found = []
    print(f"\n{'open against dense':28} {'÷ − 1':>8} {'95 % interval':>20} {'pairs':>6}   router, dispatch segments")
    for cell in run.manifest.cells:
        ratio = paired(steps[(steps["cell"] == cell.name) & (steps["pass"] == "bare")])
        own = segments[(segments["cell"] == cell.name) & (segments["arm"] == "open")].set_index("segment")["share"]
        parts = " ".join(f"{own.get(name, 0.0):>8.2%}" for name in ("router", "dispatch"))
        spread = f"[{ratio.low - 1:>8.2%}, {ratio.high - 1:>8.2%}]"
        doubt = "   the limit is inside" if ratio.low - 1 <= ROUTER_LIMIT <= ratio.high - 1 else ""
        print(f"{cell.name:28} {ratio.value - 1:>8.2%} {spread:>20} {ratio.n:>6} {parts}{doubt}")
        claim = f"router and bookkeeping, {cell.name}"
        found.append(Claim(claim, ratio.value - 1, ROUTER_LIMIT, n=ratio.n, percent=True))
    return found


def paired(bare: pd.DataFrame) -> Interval:
    """Median over pairs of steps of `open` ÷ `dense`, with a bootstrap interval over pairs."""
    times = bare.pivot(index=["repeat", "index"], columns="arm", values="wall_ns").dropna()
    ratios = (times["open"] / times["dense"]).to_numpy()
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(np.median(ratios)), float(low), float(high), len(ratios))


def realised(run: Run) -> list[Claim]:
    """Claim 2, and the same figures of the arms that are not judged, beside what their rows share."""
    table, shared = ladder(run), sharing(run).set_index(["cell", "arm"])
    columns = [
        "FLOPs skipped",
        "time saved",
        "realised",
        "interval",
        "bytes skipped",
        "rows ran",
        "weights read",
        "some",
    ]
    found, lines = [], []
    for cell in run.manifest.cells:
        for arm in (arm.name for arm in run.manifest.arms if arm.name != "dense"):
            rungs = table[(table["cell"] == cell.name) & (table["arm"] == arm)].set_index(["rung", "variant"])
            part, all_rows = rungs.loc[("realised_fraction", "executed")], shared.loc[(cell.name, arm)]
            shares = [rungs.loc[rung, "value"] for rung in (("flop_skip", "executed"), ("step_time_saved", "bare"))]
            read = rungs.loc[("weight_byte_skip", "executed"), "value"]
            lines.append(
                [
                    cell.name, arm, *(f"{share:.1%}" for share in shares), f"{part['value']:.2f}",
                    f"[{part['low']:.2f}, {part['high']:.2f}]", f"{read:.1%}", f"{all_rows['rows_ran']:.1%}",
                    f"{all_rows['weights_read']:.1%}", f"{all_rows['some']:.1%}",
                ]
            )  # fmt: skip
            if arm == "shared":
                what, limit = f"realised fraction, {cell.name}", REALISED_LIMIT[cell.phase]
                found.append(Claim(what, float(part["value"]), limit, at_least=True, n=int(part["n"])))
    print()
    print(pd.DataFrame(lines, columns=["cell", "arm", *columns]).to_string(index=False))
    return found


def main() -> int:
    repeats = parser(__doc__, 16).parse_args().repeats
    ships = any(facts["method"] == "layerroute" for facts in builtin_checkpoints().values())
    if not ships:
        print("No trained checkpoint ships with this version: forced routes only.")
    arms = ", ".join([DENSE, *SKIPPING, *([TRAINED] if ships else [])])
    prefill = "cells.prefill={batch: [1], length: [512]}"
    decode = "cells.decode={{batch: [1, 8], context: [128], new_tokens: {}}}"
    shared = ["name=layerroute", prefill, "measure.warmup=2"]
    with measured([*shared, f"arms=[{DENSE}, {OPEN}]", decode.format(16)], 4 * repeats) as run:
        claims = router(run)
    with measured([*shared, f"arms=[{arms}]", decode.format(16)], repeats) as run:
        claims += realised(run)
    print()
    print(*claims, sep="\n")
    return exit_code(claims)


if __name__ == "__main__":
    raise SystemExit(main())
