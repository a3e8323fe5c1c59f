"""Decisions, shares per layer, and the grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.routing import ALL_DOMAINS, DECISION_COLUMNS, NO_DECISION, SKIP_COLUMNS, decisions, heatmap, skip_by_layer
from profiler.errors import InputError
from profiler.records import ArmRecord, Choice
from profiler.store import Run
from tests.analysis.example_run import REQUESTS, write_example_run
from tests.analysis.tiny_run import write_run


def arm(*sites: str, layers: int = 1) -> ArmRecord:
    choices = [
        Choice(layer=layer, site=site, index=index, name=name)
        for layer in range(layers)
        for site in sites
        for index, name in enumerate(["skip", "run"])
    ]
    return ArmRecord(name="a", method="any", choices=choices)


def gate(number: int, request: str, choices: list[int], **more: Any) -> dict[str, Any]:
    row = {"arm": "a", "step": number, "phase": "prefill", "request": request, "position": -1, "layer": 0}
    return {
        **row,
        "site": "block",
        "choices": choices,
        "weights": [1.0] * len(choices),
        "gate": 0.75,
        "rows": 1,
        **more,
    }


def prompt(request: str, domain: str | None, text: str | None = None) -> dict[str, Any]:
    return {"request": request, "domain": domain, "tokens": 4, "text": text}


# -- decisions ------------------------------------------------------------------------------------------------------


def test_a_sequence_decision_is_one_row_however_many_steps_it_governs(example: Run) -> None:
    found = decisions(example, "routed", "decode-b4-c32-n4")
    assert list(found.columns) == list(DECISION_COLUMNS)
    assert len(found) == 4 * 4
    assert set(found["steps"]) == {4}
    assert set(found["rows"]) == {4}  # one token row a step
    r2 = found[found["request"] == "r2"]
    assert r2["layer"].tolist() == [0, 1, 2, 3]
    assert r2["choice"].tolist() == ["run", "skip", "skip", "run"]
    assert set(r2["domain"]) == {"tool_call"}
    assert r2["gate"].tolist() == pytest.approx([0.7311, 0.2689, 0.2689, 0.7311], abs=1e-4)  # σ(±1)


def test_a_request_that_decides_again_has_a_row_for_each_decision(tmp_path: Path) -> None:
    gates = [gate(0, "r", [1], gate=0.9), gate(1, "r", [0], gate=0.2), gate(2, "r", [0], gate=0.2)]
    found = decisions(write_run(tmp_path / "run", [arm("block")], {"gates": gates}), "a", "cell")
    assert found[["choice", "steps", "rows"]].values.tolist() == [["run", 1, 1], ["skip", 2, 2]]


def test_requests_stand_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    names = ["r9", "r10", "r2"]
    tables = {"gates": [gate(0, r, [1]) for r in sorted(names)], "prompts": [prompt(r, None) for r in names]}
    found = decisions(write_run(tmp_path / "run", [arm("block")], tables), "a", "cell")
    assert found["request"].tolist() == names
    assert found["domain"].isna().all()


def test_unknown_names_are_refused_with_those_there_are(example: Run) -> None:
    with pytest.raises(InputError, match=r"has no arm 'rooted'; it has dense, routed, forced"):
        decisions(example, "rooted", "prefill-b4-l32")
    with pytest.raises(InputError, match=r"has no cell 'x'; it has prefill-b1-l32"):
        heatmap(example, "routed", "x")


def test_dense_decides_nothing(example: Run) -> None:
    assert decisions(example, "dense", "prefill-b4-l32").empty
    grid = heatmap(example, "dense", "prefill-b4-l32")
    assert (grid.scope, grid.choice.shape, grid.note) == ("none", (0, 0), "no decisions were recorded here")


# -- shares ---------------------------------------------------------------------------------------------------------


def test_skip_by_layer_over_all_and_by_domain(example: Run) -> None:
    found = skip_by_layer(example)
    assert list(found.columns) == list(SKIP_COLUMNS)
    own = found[(found["arm"] == "routed") & (found["cell"] == "prefill-b4-l32") & (found["choice"] == "skip")]
    # Layer 1 is skipped by r0 and r2, layer 2 by r1 and r2, of four.
    everyone = own[own["domain"] == ALL_DOMAINS]
    assert everyone["decision_share"].tolist() == [0, 0.5, 0.5, 0]
    assert everyone["row_share"].tolist() == [0, 0.5, 0.5, 0]
    assert everyone["rows"].tolist() == [0, 64, 64, 0]
    code = own[own["domain"] == "code"]
    assert code["decision_share"].tolist() == [0, 0, 1, 0]
    assert list(dict.fromkeys(own["domain"])) == [ALL_DOMAINS, "code", "math", "prose", "tool_call"]
    assert list(dict.fromkeys(found["arm"])) == ["routed", "forced"]


def test_shares_of_rows_weigh_requests_by_their_length(tmp_path: Path) -> None:
    gates = [gate(0, "short", [0], rows=10), gate(0, "long", [1], rows=30)]
    found = skip_by_layer(write_run(tmp_path / "run", [arm("block")], {"gates": gates})).set_index("choice")
    assert found["decision_share"].to_dict() == {"skip": 0.5, "run": 0.5}
    assert found["row_share"].to_dict() == {"skip": 0.25, "run": 0.75}


def test_a_sequence_counts_once_in_decisions_and_every_step_in_rows(tmp_path: Path) -> None:
    gates = [gate(n, "a", [0]) for n in range(3)] + [gate(0, "b", [1])]
    found = skip_by_layer(write_run(tmp_path / "run", [arm("block")], {"gates": gates})).set_index("choice")
    assert found["decisions"].to_dict() == {"skip": 1, "run": 1}
    assert found["rows"].to_dict() == {"skip": 3, "run": 1}


def test_several_choices_at_once_are_joined(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [arm("block")], {"gates": [gate(0, "a", [0, 1]), gate(0, "b", [1])]})
    assert decisions(run, "a", "cell")["choice"].tolist() == ["skip+run", "run"]
    found = skip_by_layer(run)
    assert found[["choice", "decisions"]].values.tolist() == [["skip", 0], ["run", 1], ["skip+run", 1]]


def test_shares_of_an_empty_run(tmp_path: Path) -> None:
    found = skip_by_layer(Run(write_example_run(tmp_path / "run", stage="start", state="killed")))
    assert found.empty
    assert list(found.columns) == list(SKIP_COLUMNS)


# -- grid -----------------------------------------------------------------------------------------------------------


def test_heatmap_of_sequences(example: Run) -> None:
    grid = heatmap(example, "routed", "prefill-b4-l32")
    assert (grid.scope, grid.request, grid.note) == ("sequence", None, "")
    assert grid.row_labels == grid.requests == list(REQUESTS)
    assert grid.row_domains == ["math", "code", "tool_call", "prose"]
    assert grid.column_labels == ["0", "1", "2", "3"]
    assert grid.choice_names == ["skip", "run"]
    assert grid.choice.tolist() == [list(layers) for _, _, layers in REQUESTS.values()]
    assert grid.gate[1].tolist() == pytest.approx([0.7311, 0.7311, 0.2689, 0.7311], abs=1e-4)
    assert grid.texts == [text for _, text, _ in REQUESTS.values()]
    assert grid.prompt is None


def test_heatmap_of_tokens_shows_one_request(tmp_path: Path) -> None:
    gates = [
        gate(0, request, [position % 2], position=position, site=site)
        for request, length in (("b", 2), ("a", 3))
        for position in range(length)
        for site in ("ffn", "attention")
    ]
    tables = {"gates": gates[:-1], "prompts": [prompt("b", "math", "two"), prompt("a", "code", "three")]}
    run = write_run(tmp_path / "run", [arm("attention", "ffn")], tables)
    first, second = heatmap(run, "a", "cell"), heatmap(run, "a", "cell", request="a")
    assert (first.scope, first.request, first.requests, first.prompt) == ("token", "b", ["b", "a"], "two")
    assert (second.row_labels, second.column_labels) == (["0", "1", "2"], ["0 attention", "0 ffn"])
    assert second.choice.tolist() == [[0, 0], [1, 1], [NO_DECISION, 0]]
    assert np.isnan(second.gate[2, 0])
    assert (second.texts, second.prompt, second.row_domains) == (None, "three", ["code"] * 3)
    with pytest.raises(InputError, match="decided nothing for request 'c' in cell; it has b, a"):
        heatmap(run, "a", "cell", request="c")


def test_withheld_text_and_missing_gates(tmp_path: Path) -> None:
    run = Run(write_example_run(tmp_path / "run", keeps_text=False, nan_gates=True))
    grid = heatmap(run, "routed", "prefill-b4-l32")
    assert (grid.texts, grid.note) == (None, "text withheld by the spec")
    assert np.isnan(grid.gate).all()
    assert (grid.choice != NO_DECISION).all()
    assert len(decisions(run, "routed", "decode-b4-c32-n4")) == 16  # NaN gates are one decision too


def test_a_session_shows_the_first_decision_of_each_request(tmp_path: Path) -> None:
    gates = [gate(0, "row-0", [1], gate=0.9), gate(1, "row-0", [0], gate=0.1)]
    grid = heatmap(write_run(tmp_path / "run", [arm("block")], {"gates": gates}), "a", "cell")
    assert grid.choice.tolist() == [[1]]
    assert grid.row_domains == [None]
    assert grid.note == (
        "requests decided more than once here; the first decision of each is shown; "
        "the text of the prompts was not kept"
    )


def test_grid_and_decisions_agree(example: Run) -> None:
    for name in ("routed", "forced"):
        grid, found = heatmap(example, name, "prefill-b4-l32"), decisions(example, name, "prefill-b4-l32")
        table = pd.pivot(found, index="request", columns="layer", values="choice").loc[grid.row_labels]
        named = [[grid.choice_names[c] for c in row] for row in grid.choice]
        assert named == table.values.tolist()
