"""The frames of a training as tables of text, shared by its report, a run's report and the page."""

from __future__ import annotations

from analysis import wording
from analysis.tables import Table, table, text
from analysis.training import Training


def held_out(training: Training) -> Table:
    """A line an evaluation and domain; the checkpoint as it is stored is marked as such."""
    return table(
        training.held_out,
        [
            ("After update", True, lambda r: wording.count(r.step)),
            ("Numbers of", False, lambda r: "training" if wording.absent(r.stored) else f"checkpoint, {r.stored}"),
            ("Domain", False, lambda r: text(r.domain)),
            ("Gates open (nats a token)", True, lambda r: wording.number(r.open_nats_per_token, 4)),
            ("Routed (nats a token)", True, lambda r: wording.number(r.routed_nats_per_token, 4)),
            ("Skipped (% of routed layers)", True, lambda r: wording.percent(r.skip_rate)),
            ("Layers that decide by input", True, lambda r: wording.count(r.deciding)),
            ("Sequences", True, lambda r: wording.count(r.sequences)),
            ("Tokens predicted", True, lambda r: wording.count(r.tokens)),
        ],
    )


def steps(training: Training) -> Table:
    """A line an update."""
    return table(
        training.steps,
        [
            ("Update", True, lambda r: wording.count(r.step)),
            ("Loss", True, lambda r: wording.number(r.loss, 4)),
            ("Language model (nats a token)", True, lambda r: wording.number(r.lm_nats_per_token, 4)),
            ("Regulariser", True, lambda r: wording.number(r.regulariser, 4)),
            ("Skipped (% of routed layers)", True, lambda r: wording.percent(r.skip_rate)),
            ("Gradient norm, before clipping", True, lambda r: wording.number(r.gradient_norm, 4)),
            ("Learning rate", True, lambda r: f"{r.learning_rate:.2e}"),
            ("Tokens", True, lambda r: wording.count(r.tokens)),
            ("Tokens a second", True, lambda r: wording.number(r.tokens_per_s)),
            ("Seconds so far", True, lambda r: wording.number(r.seconds, 4)),
        ],
    )


def facts(training: Training) -> Table:
    """How it was made."""
    return Table(("Fact", "Value"), list(training.facts))
