"""States come back exactly, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from profiler import training_state
from profiler.errors import InputError


def trained(seed: int, steps: int) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in (("a", (3, 2)), ("b", (4,)))
    }
    adamw = torch.optim.AdamW(parameters.values(), lr=0.1)
    for _ in range(steps):
        update(parameters, adamw)
    return parameters, adamw


def update(parameters: dict[str, nn.Parameter], adamw: torch.optim.AdamW) -> None:
    adamw.zero_grad()
    torch.stack([(value**3).sum() for value in parameters.values()]).sum().backward()
    adamw.step()


def test_going_on_from_a_state_equals_never_having_stopped(tmp_path: Path) -> None:
    parameters, adamw = trained(0, steps=3)
    training_state.save(tmp_path, 3, "hash", parameters, adamw)
    others, fresh = trained(1, steps=0)
    state = training_state.latest(tmp_path)
    assert state == tmp_path / "step-00000003"
    assert training_state.restore(state, "hash", others, fresh) == 3
    for _ in range(2):
        update(parameters, adamw)
        update(others, fresh)
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)


def test_only_the_last_state_is_kept_and_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    parameters, adamw = trained(0, steps=1)
    (tmp_path / ".part-00000009").mkdir(parents=True)
    assert training_state.latest(tmp_path) is None
    for step in (1, 2, 2):
        training_state.save(tmp_path, step, "hash", parameters, adamw)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000002"]


def test_a_state_of_another_recipe_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    parameters, adamw = trained(0, steps=1)
    training_state.save(tmp_path, 1, "a" * 64, parameters, adamw)
    others, fresh = trained(1, steps=0)
    before = {name: value.detach().clone() for name, value in others.items()}
    with pytest.raises(InputError, match="another recipe .hash aaaaaaaaaaaa, this one has bbbbbbbbbbbb"):
        training_state.restore(tmp_path / "step-00000001", "b" * 64, others, fresh)
    assert all(torch.equal(others[name], before[name]) for name in others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "state.json").unlink(), "there is no state.json in it"),
        (lambda folder: (folder / "state.json").write_text('{"format": 2, "step": 1}'), "its format is 2"),
        (lambda folder: (folder / "state.json").write_text('{"format": 1, "step": "x"}'), "format"),
        (lambda folder: (folder / "state.safetensors").write_bytes(b"torn"), "cannot be read"),
    ],
)
def test_a_spoilt_state_is_refused(tmp_path: Path, change: object, message: str) -> None:
    parameters, adamw = trained(0, steps=1)
    training_state.save(tmp_path, 1, "hash", parameters, adamw)
    change(tmp_path / "step-00000001")  # type: ignore[operator]
    with pytest.raises(InputError, match=message):
        training_state.restore(tmp_path / "step-00000001", "hash", parameters, adamw)


def test_a_state_names_its_step_and_recipe(tmp_path: Path) -> None:
    parameters, adamw = trained(0, steps=1)
    training_state.save(tmp_path, 7, "hash", parameters, adamw)
    facts = json.loads((tmp_path / "step-00000007" / "state.json").read_text())
    assert facts == {"format": 1, "step": 7, "recipe_sha256": "hash"}
