"""Which experts there are, that choosing them is no skip, and how often each and each group was chosen."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.charts import Look
from analysis.expert_charts import expert_heat, group_bars
from analysis.expert_shares import ALL_LAYERS, GROUP_COLUMNS, SHARE_COLUMNS, expert_shares, group_shares
from analysis.experts import Expert, experts_of
from analysis.routing import ALL_DOMAINS, skip_by_layer
from analysis.sharing import sharing
from analysis.skips import deciding_arms, skipping_choices
from profiler.records import ArmRecord, CellRecord, Choice, ParallelRecord
from profiler.store import Run
from tests.analysis import expert_run
from tests.analysis.expert_run import DECODE, PREFILL
from tests.analysis.tiny_run import write_run


def test_a_backbones_ffn_is_none_of_the_experts_in_its_place() -> None:
    found = experts_of(expert_run.arm(), 8)
    assert list(found) == [1, 2]
    assert found[1][0] == Expert(0, "g0e0", 0, 2)
    assert found[1][7] == Expert(7, "g1e3", 1, 6)
    assert len(found[1]) == 8


def test_experts_that_are_the_backbones_own() -> None:
    choices = [Choice(layer=0, site="experts", index=i, name=f"e{i}", backbone_parameters=240) for i in (1, 0)]
    stock = ArmRecord(name="stock", method="any", choices=choices)
    assert experts_of(stock, 8) == {0: [Expert(0, "e0", 0, 10), Expert(1, "e1", 0, 10)]}
    assert experts_of(stock, None)[0][0].width is None
    assert experts_of(stock, 7)[0][0].width is None  # 240 is no multiple of 3·7


def test_a_choice_that_stands_for_all_of_them_is_no_expert() -> None:
    choices = [Choice(layer=0, site="experts", index=i, name=f"e{i}", backbone_parameters=240) for i in (0, 1)]
    choices.append(Choice(layer=0, site="experts", index=2, name="all", backbone_parameters=480))
    parallel = ParallelRecord(ranks=1, placement="all_size", widths_E=[10, 10])
    stock = ArmRecord(name="stock", method="any", choices=choices, parallel=parallel)
    assert [expert.name for expert in experts_of(stock, 8)[0]] == ["e0", "e1"]


def test_choosing_experts_skips_nothing(experts: Run) -> None:
    assert skipping_choices(experts.manifest.arm("mohge")) == {}
    assert deciding_arms(experts) == []
    assert skip_by_layer(experts).empty
    assert sharing(experts).empty


def test_shares_of_experts(experts: Run) -> None:
    found = expert_shares(experts)
    assert tuple(found.columns) == SHARE_COLUMNS
    rows = found[(found["cell"] == PREFILL) & (found["domain"] == ALL_DOMAINS)]
    first, second = (rows[rows["layer"] == layer] for layer in (1, 2))
    # Layer 1: token t of 16 takes experts t and t + 1 mod 8, the first with weight 0.75: 4 pairs of 32 each.
    assert first["pairs"].tolist() == [4] * 8
    assert first["share"].tolist() == [0.125] * 8
    assert first["to_even"].tolist() == [1.0] * 8
    # Layer 2: all 16 take 0 (0.75) and 7 (0.25).
    assert second["pairs"].tolist() == [16, 0, 0, 0, 0, 0, 0, 16]
    assert second["to_even"].tolist() == [4, 0, 0, 0, 0, 0, 0, 4]
    assert second["weight_share"].tolist() == pytest.approx([0.75, 0, 0, 0, 0, 0, 0, 0.25])
    assert second["width"].tolist() == [2] * 4 + [6] * 4


def test_shares_by_domain_and_cell(experts: Run) -> None:
    found = expert_shares(experts)
    assert list(dict.fromkeys(found["cell"])) == [PREFILL, DECODE]
    # Request 0 is math, request 3 has no domain. Step 0 of request 0: experts 0 and 4; step 1: 0 and 1.
    rows = found[(found["cell"] == DECODE) & (found["layer"] == 1)]
    assert set(rows["domain"]) == {ALL_DOMAINS, "math", "code", "prose"}
    assert rows[rows["domain"] == "math"]["pairs"].tolist() == [2, 1, 0, 0, 1, 0, 0, 0]


def test_shares_of_groups(experts: Run) -> None:
    found = group_shares(expert_shares(experts))
    assert tuple(found.columns) == GROUP_COLUMNS
    rows = found[(found["cell"] == DECODE) & (found["domain"] == ALL_DOMAINS)]
    # Layer 1: step 0 one pair each of 8 experts, step 1 all 8 to group 0: 12 of 16. Layer 2 the other way round.
    assert rows[rows["layer"] == 1]["share"].tolist() == [0.75, 0.25]
    assert rows[rows["layer"] == 2]["share"].tolist() == [0.25, 0.75]
    every = rows[rows["layer"] == ALL_LAYERS]
    assert every[["pairs", "share", "even", "to_even"]].to_numpy().tolist() == [[16, 0.5, 0.5, 1]] * 2
    assert every["experts"].tolist() == [4, 4]
    assert every["width"].tolist() == [2, 6]


def test_a_run_without_experts_has_no_shares(example: Run) -> None:
    assert expert_shares(example).empty
    assert group_shares(expert_shares(example)).empty


def test_widths_that_differ_in_a_group_are_not_one_width(tmp_path: Path) -> None:
    choices = [
        Choice(layer=0, site="experts", index=i, name=f"g0e{i}", replacement_parameters=24 * (i + 1)) for i in range(2)
    ]
    gate = {
        "arm": "a", "step": 0, "phase": "prefill", "request": "r", "position": 0, "layer": 0, "site": "experts",
        "choices": [0], "weights": [1.0], "gate": 0.5, "rows": 1,
    }  # fmt: skip
    run = write_run(
        tmp_path / "run",
        [ArmRecord(name="a", method="any", scope="token", choices=choices)],
        {"gates": [gate]},
        cells=[CellRecord(name="cell", phase="prefill", batch=1, length=1, done=True)],
    )
    groups = group_shares(expert_shares(run))
    assert groups["width"].isna().all()
    assert groups["share"].tolist() == [1.0, 1.0]


def test_where_all_run_as_one_choice_no_share_is_told(tmp_path: Path) -> None:
    gate = {
        "arm": "mohge", "step": 0, "phase": "prefill", "request": "r0", "position": 0, "layer": 1, "site": "experts",
        "choices": [8], "weights": [1.0], "gate": 1.0, "rows": 1,
    }  # fmt: skip
    routed = gate | {"layer": 2, "choices": [3], "weights": [1.0]}
    found = expert_shares(write_run(tmp_path / "run", [expert_run.arm()], {"gates": [gate, routed]}))
    assert set(found["layer"]) == {2}
    assert found["pairs"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


class TestCharts:
    def test_the_heat_map_has_a_column_an_expert_and_names_groups(self, experts: Run) -> None:
        rows = expert_shares(experts)
        rows = rows[(rows["cell"] == PREFILL) & (rows["domain"] == ALL_DOMAINS)]
        figure = expert_heat(rows, "mohge", Look.of(experts.manifest))
        assert [list(line) for line in figure.data[0].z] == [[1.0] * 8, [4.0, 0, 0, 0, 0, 0, 0, 4.0]]
        assert [note.text for note in figure.layout.annotations] == ["group 0<br>width 2", "group 1<br>width 6"]
        assert figure.data[0].customdata[1][7].startswith("layer 2, g1e3, width 6: 16 token-expert pairs, 50.0")

    def test_bars_of_groups_stand_beside_an_even_share(self, experts: Run) -> None:
        groups = group_shares(expert_shares(experts))
        figure = group_bars(groups[groups["cell"] == PREFILL], "mohge", Look.of(experts.manifest))
        bars, even, domains = figure.data
        assert list(bars.y) == [50.0, 50.0]
        assert list(even.y) == [50.0, 50.0]
        assert list(domains.y) == ["code", "math", "prose"]

    def test_a_long_name_is_broken_over_lines(self, experts: Run) -> None:
        rows = expert_shares(experts)
        look = Look(colours={"mohge": "#0072b2"}, names={"mohge": "mohge (" + "very " * 30 + "long)"})
        figure = expert_heat(rows[rows["domain"] == ALL_DOMAINS].query(f"cell == '{PREFILL}'"), "mohge", look)
        lines = figure.layout.title.text.split("<br>")
        assert max(map(len, lines)) <= 58
        assert figure.layout.margin.t >= 17 * len(lines)


def test_frames_are_typed(experts: Run) -> None:
    assert expert_shares(experts)["width"].dtype == pd.Int64Dtype()
