"""Everything said of held-out inputs in one run, computed once for the report, the terminal and the page.

Selection and order only: the figures are `quality`'s, `answers`', `matched`'s, `baselines`', `diagnostics`' and
`tracking`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from analysis import answers, baselines, diagnostics, quality, tracking
from analysis.matched import Matched, compared
from analysis.skips import HELD_OUT
from profiler.store import Run


@dataclass(frozen=True)
class HeldOut:
    """Frames of the functions they are named after, those of single arms one below the other.

    `rates` holds the held-out cell's prompts only. `arms`: those with decisions about held-out inputs.
    """

    perplexity: pd.DataFrame
    accuracy: pd.DataFrame
    retain: pd.DataFrame
    matched: Matched
    pairs: pd.DataFrame
    sentences: list[str]
    rates: pd.DataFrame
    eligibility: pd.DataFrame
    flips: pd.DataFrame
    drift: pd.DataFrame
    tracks: pd.DataFrame
    confounds: pd.DataFrame
    arms: list[str]

    @property
    def measured(self) -> bool:
        """Whether anything was scored or decided."""
        return not self.perplexity.empty or bool(self.arms)


def held_out(run: Run) -> HeldOut:
    """Read and compute all of it."""
    rates = diagnostics.skip_rates(run)
    eligible = diagnostics.eligibility(run)
    rates = rates[(rates["cell"] == HELD_OUT) & (rates["phase"] == "prefill")].reset_index(drop=True)
    # Of a run that goes on, an arm's first rows may come between two of these readings.
    begun = (eligible["requests"] > 0) & eligible["arm"].isin(rates["arm"])
    arms = [str(arm) for arm in eligible.loc[begun, "arm"]]

    def of_arms(function: Callable[[Run, str], pd.DataFrame]) -> pd.DataFrame:
        frames = [frame for frame in (function(run, arm) for arm in arms) if not frame.empty]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=_columns[function])

    return HeldOut(
        perplexity=quality.perplexity(run),
        accuracy=answers.accuracy(run),
        retain=answers.retain(run),
        matched=compared(run),
        pairs=baselines.pairs(run),
        sentences=baselines.sentences(run),
        rates=rates,
        eligibility=eligible[eligible["requests"] > 0].reset_index(drop=True),
        flips=of_arms(diagnostics.flip_rates),
        drift=of_arms(diagnostics.drift),
        tracks=of_arms(tracking.tracks),
        confounds=of_arms(tracking.confounds),
        arms=arms,
    )


_columns: dict[Callable[..., pd.DataFrame], list[str]] = {
    diagnostics.flip_rates: list(diagnostics.FLIP_COLUMNS),
    diagnostics.drift: list(diagnostics.DRIFT_COLUMNS),
    tracking.tracks: list(tracking.TRACK_COLUMNS),
    tracking.confounds: list(tracking.CONFOUND_COLUMNS),
}
