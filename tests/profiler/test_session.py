"""The recorder around a user's own loop: ten lines, labels, refusals, and a model that is left as it was."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from profiler import methods, models, session
from profiler.errors import InputError, RuleError, StoreError
from profiler.recorder import StepData
from profiler.session import record, wrap
from profiler.store import Run
from tests.profiler.gated_methods import ComputesAll, MeanGate, named
from tests.profiler.tiny import padded, prompts_of, random_model

HALF = {"forced": {"ratio": 0.5, "pattern": "shared"}}


@pytest.fixture
def model() -> Any:
    return random_model("llama", dtype=torch.float32)


def hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_the_ten_lines_of_the_readme(tmp_path: Path) -> None:
    model = models.load("tiny", device="cpu").model
    batches = [(torch.full((2, 5), 65), ["a", "b"]), (torch.full((1, 3), 66), ["c"])]

    wrap(model, "layerroute", gates=HALF)
    with record(model, out=tmp_path / "mine", arm="mine") as recording:
        for input_ids, ids in batches:
            with recording.step(phase="prefill", requests=ids):
                model(input_ids)

    run = Run(tmp_path / "mine")
    found = run.manifest
    assert (run.state, found.origin, found.name, found.spec_sha256, run.spec_yaml) == (
        "complete",
        "session",
        "mine",
        None,
        None,
    )
    assert [(a.name, a.method, a.twin, a.scope) for a in found.arms] == [("mine", "layerroute", None, "sequence")]
    assert found.arms[0].synthetic == "forced: 50% of layers skip, pattern shared, seed 0"
    assert found.model is not None
    assert (found.model.source, found.model.random_weights, found.model.parameters) == ("tiny", True, 312_320)
    assert [(c.name, c.phase, c.done, c.stopped) for c in found.cells] == [
        ("session-prefill", "prefill", True, "session")
    ]
    assert [(r.rule, r.passed, r.detail) for r in found.rules] == [(1, True, "equal in 2 steps")]
    steps = run.frame("steps")
    assert steps[["step", "pass", "rows", "context"]].values.tolist() == [
        [0, "instrumented", 10, 2 * 15],
        [1, "instrumented", 3, 6],
    ]
    gates = run.frame("gates")
    assert gates.groupby("step")["request"].unique().map(list).to_dict() == {0: ["a", "b"], 1: ["c"]}
    assert gates.groupby(["step", "request"])["choices"].agg(lambda c: sum(x[0] for x in c)).to_dict() == {
        (0, "a"): 3, (0, "b"): 3, (1, "c"): 3,
    }  # fmt: skip
    segments = run.frame("segments").groupby("step")["ns"].sum()
    assert (segments.to_numpy() <= steps["wall_ns"].to_numpy()).all()
    assert found.counts == {name: len(run.frame(name)) for name in run.tables()}


def test_generate_is_a_prompt_step_and_a_step_a_token(model: Any, tmp_path: Path) -> None:
    wrap(model, "layerroute", gates=HALF)
    batch = padded(prompts_of([6, 3]), "left")
    del batch["position_ids"]
    with record(model, out=tmp_path / "r"):
        model.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=0)
    run = Run(tmp_path / "r")
    steps = run.frame("steps").sort_values("step")
    assert steps[["phase", "rows", "context"]].values.tolist() == [
        ["prefill", 9, 21 + 6],
        ["decode", 2, 7 + 4],
        ["decode", 2, 8 + 5],
        ["decode", 2, 9 + 6],
    ]
    assert [cell.name for cell in run.manifest.cells] == ["session-prefill", "session-decode"]
    routes = run.frame("gates").groupby(["request", "layer"])["gate"].nunique()
    assert set(routes) == {1}  # frozen from the prompt on
    assert set(run.frame("gates")["request"]) == {"row-0", "row-1"}
    assert run.frame("kv").sort_values("step")["live_bytes"].is_monotonic_increasing


def test_an_unwrapped_model_is_recorded_as_dense_and_left_without_a_trace(model: Any, tmp_path: Path) -> None:
    ids = torch.tensor(prompts_of([6, 6]))
    before = model(ids).logits
    with record(model, out=tmp_path / "r"):
        inside = model(ids).logits
    assert torch.equal(inside, before)
    assert torch.equal(model(ids).logits, before)
    assert hooks(model) == 0
    assert not hasattr(model, "gatewise")
    assert "gatewise" not in model.__dict__
    run = Run(tmp_path / "r")
    assert run.manifest.arms[0].method == "dense"
    assert len(run.frame("steps")) == 1
    assert "gates" not in run.tables()
    wrap(model, "layerroute")  # it can still be wrapped


def test_forwards_outside_the_block_are_not_recorded(model: Any, tmp_path: Path) -> None:
    wrap(model, "layerroute")
    ids = torch.tensor(prompts_of([6]))
    model(ids)
    with record(model, out=tmp_path / "r"):
        model(ids)
    before = hooks(model)
    model(ids)
    assert hooks(model) == before
    assert len(Run(tmp_path / "r").frame("steps")) == 1


def test_a_model_that_is_trained_can_be_recorded(model: Any, tmp_path: Path) -> None:
    """No no_grad around it: the loop is the user's."""
    wrap(model, "layerroute")
    with record(model, out=tmp_path / "r"):
        model(torch.tensor(prompts_of([6, 6]))).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    assert len(Run(tmp_path / "r").frame("gates")) == 2 * 6


def test_two_arms_one_after_the_other_into_two_folders(tmp_path: Path) -> None:
    ids = torch.tensor(prompts_of([6, 6]))
    for name, options in (("dense", None), ("half", {"gates": HALF})):
        model = random_model("llama", dtype=torch.float32)
        if options is not None:
            wrap(model, "layerroute", **options)
        with record(model, out=tmp_path / name, arm=name) as recording, recording.step(requests=["x", "y"]):
            model(ids)
    dense, half = Run(tmp_path / "dense"), Run(tmp_path / "half")
    assert dense.manifest.model == half.manifest.model
    assert [run.manifest.arms[0].name for run in (dense, half)] == ["dense", "half"]
    for table in ("steps", "rows", "segments"):
        assert dense.table(table).columns == half.table(table).columns
    again = random_model("llama", dtype=torch.float32)
    for number in (1, 2):  # and the same model twice
        with record(again, out=tmp_path / f"again-{number}"):
            again(ids)
    assert len(Run(tmp_path / "again-2").frame("steps")) == 1


# -- labels -------------------------------------------------------------------------------------------


def test_labels_are_the_users_inside_step_and_ours_outside(model: Any, tmp_path: Path) -> None:
    wrap(model, "layerroute")
    ids = torch.tensor(prompts_of([6, 6]))
    with record(model, out=tmp_path / "r") as recording:
        with recording.step(phase="mixed", requests=range(7, 9)):
            model(ids)
        model(ids)
        with recording.step(phase="decode"):
            model(ids)
    run = Run(tmp_path / "r")
    assert run.frame("steps").sort_values("step")["phase"].tolist() == ["mixed", "prefill", "decode"]
    requests = run.frame("gates").groupby("step")["request"].agg(lambda r: sorted(set(r))).tolist()
    assert requests == [["7", "8"], ["row-0", "row-1"], ["row-0", "row-1"]]
    assert [cell.name for cell in run.manifest.cells] == ["session-mixed", "session-prefill", "session-decode"]


def test_an_unknown_phase_is_refused(model: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"step\(phase='prefil'\): a phase is one of prefill, decode, mixed"),
        record(model, out=tmp_path / "r") as recording,
        recording.step(phase="prefil"),  # type: ignore[arg-type]
    ):
        model(torch.tensor([[1]]))


def test_another_number_of_ids_than_rows_is_refused_and_the_session_can_go_on(model: Any, tmp_path: Path) -> None:
    ids = torch.tensor(prompts_of([6, 6]))
    with record(model, out=tmp_path / "r") as recording:
        with (
            pytest.raises(InputError, match="3 request ids were given for a batch of 2 rows"),
            recording.step(requests=["a", "b", "c"]),
        ):
            model(ids)
        model(ids)
    assert len(Run(tmp_path / "r").frame("steps")) == 1
    assert Run(tmp_path / "r").state == "complete"


# -- refusals -----------------------------------------------------------------------------------------


def test_a_recording_inside_a_recording_is_refused_and_the_outer_one_goes_on(model: Any, tmp_path: Path) -> None:
    ids = torch.tensor(prompts_of([6]))
    with record(model, out=tmp_path / "outer"):
        with pytest.raises(InputError, match="being recorded already"), record(model, out=tmp_path / "inner"):
            pass
        model(ids)
    assert not (tmp_path / "inner").exists()
    assert len(Run(tmp_path / "outer").frame("steps")) == 1


def test_a_taken_folder_is_refused_and_the_model_is_left_as_it_was(model: Any, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "x").write_text("mine")
    with pytest.raises(InputError, match="must be new or empty"), record(model, out=tmp_path / "r"):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot make the run folder"), record(model, out=tmp_path / "file" / "r"):
        pass
    assert (hooks(model), hasattr(model, "gatewise")) == (0, False)


def test_a_wrong_method_or_option_leaves_the_model_as_it_was(model: Any) -> None:
    with pytest.raises(InputError, match="method 'layerrout' is not known"):
        wrap(model, "layerrout")
    with pytest.raises(InputError, match=r"gate: .*did you mean 'gates'"):
        wrap(model, "layerroute", gate="open")
    assert (hooks(model), hasattr(model, "gatewise")) == (0, False)
    wrap(model, "layerroute")
    with pytest.raises(InputError, match="wrapped already, by LayerRoute"):
        wrap(model, "dense")


# -- sessions that end otherwise ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "state", "detail"),
    [(ValueError("mine"), "failed", "ValueError: mine"), (KeyboardInterrupt(), "interrupted", "stopped by the user")],
)
def test_an_error_in_the_block_keeps_the_steps_before_it(
    model: Any, tmp_path: Path, error: BaseException, state: str, detail: str
) -> None:
    wrap(model, "layerroute")
    ids = torch.tensor(prompts_of([6, 6]))

    def loop() -> None:
        with record(model, out=tmp_path / "r"):
            model(ids)
            model(ids)
            raise error

    with pytest.raises(type(error)):
        loop()
    run = Run(tmp_path / "r")
    assert run.state == state
    assert str(run.manifest.state_detail).startswith(detail)
    assert len(run.frame("steps")) == 2
    assert len(run.frame("gates")) == 2 * 2 * 6
    assert [cell.name for cell in run.manifest.cells] == ["session-prefill"]
    assert [(rule.rule, rule.passed) for rule in run.manifest.rules] == [(1, True)]
    with record(model, out=tmp_path / "after"):  # and the model can be recorded again
        model(ids)
    assert Run(tmp_path / "after").state == "complete"


def test_an_error_inside_the_model_is_no_step(model: Any, tmp_path: Path) -> None:
    with record(model, out=tmp_path / "r"):
        with pytest.raises(IndexError):
            model(torch.tensor([[10_000]]))
        model(torch.tensor([[1]]))
    assert len(Run(tmp_path / "r").frame("steps")) == 1


def test_a_method_that_computes_what_it_says_it_skips_fails_the_session(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap(model, named(ComputesAll, monkeypatch))
    with (
        pytest.raises(RuleError, match=r"rule 1 \(rows executed = gates recorded\) does not hold: layer \d block run"),
        record(model, out=tmp_path / "r"),
    ):
        model(**padded(prompts_of([9, 5, 3, 7]), "left"))
    run = Run(tmp_path / "r")
    assert (run.state, len(run.frame("steps"))) == ("failed", 1)
    assert not run.manifest.rules[0].passed


def test_a_users_own_method_is_named_as_it_is_loaded(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = named(MeanGate, monkeypatch)
    wrap(model, name)
    with record(model, out=tmp_path / "r"):
        model(torch.tensor(prompts_of([6, 6])))
    assert Run(tmp_path / "r").manifest.arms[0].method == name
    assert methods.load(name) is MeanGate


def test_a_full_disk_is_the_sessions_error_and_the_steps_before_are_kept(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(StoreError, match="No space left on device"), record(model, out=tmp_path / "r"):
        model(torch.tensor([[1]]))
    run = Run(tmp_path / "r")
    assert run.state == "failed"
    assert "No space left on device" in str(run.manifest.state_detail)
    assert (hooks(model), hasattr(model, "gatewise")) == (0, False)


def test_the_cell_of_a_phase_is_in_the_manifest_from_its_first_step_on(model: Any, tmp_path: Path) -> None:
    """So that a session that is killed opens with what its writer had put on disk."""
    with record(model, out=tmp_path / "r"):
        model(torch.tensor([[1]]))
        assert [(c.name, c.done) for c in Run(tmp_path / "r").manifest.cells] == [("session-prefill", False)]


def test_dropped_steps_are_counted_and_are_in_no_table(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = session.Session.accept

    def accepting(self: session.Session, data: StepData) -> None:
        if self._steps == 1:
            monkeypatch.setattr(self._writer, "_queue", _Full(self._writer._queue))
        accept(self, data)
        if self._steps == 2:
            monkeypatch.undo()

    monkeypatch.setattr(session.Session, "accept", accepting)
    with record(model, out=tmp_path / "r"):
        for _ in range(3):
            model(torch.tensor([[1, 2]]))
    run = Run(tmp_path / "r")
    assert run.manifest.drops == {"steps": 1}
    assert run.frame("steps")["step"].tolist() == [0, 2]
    assert run.manifest.rules[0].detail == "equal in 2 steps"


class _Full:
    """A queue that takes nothing without being waited for."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put_nowait(self, item: Any) -> None:
        import queue

        raise queue.Full

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


# -- what is refused in words -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-x", "x\n", "é", "a" * 65])
def test_an_arm_is_called_as_in_a_spec(model: Any, tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(InputError, match=r"record\(arm='.*'\): an arm's name must be letters"),
        record(model, out=tmp_path / "r", arm=name),
    ):
        pass
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("other", [torch.nn.Linear(2, 2), "smollm2-135m", None], ids=["module", "name", "none"])
def test_what_is_no_transformers_model_is_refused(tmp_path: Path, other: Any) -> None:
    kind = type(other).__name__
    with (
        pytest.raises(InputError, match=f"{kind} is no model of the transformers library"),
        record(other, tmp_path / "r"),
    ):
        pass
    with pytest.raises(InputError, match=f"{kind} is no model of the transformers library"):
        wrap(other, "dense")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("routed", [False, True], ids=["dense", "routed"])
@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (torch.zeros((0, 4), dtype=torch.long), "the batch is empty: 0 rows of 4 tokens"),
        (torch.zeros((2, 0), dtype=torch.long), "the batch is empty: 2 rows of 0 tokens"),
        (
            torch.zeros(4, dtype=torch.long),
            r"a batch is \[rows, tokens\], and the model was called with a shape of \(4,\)",
        ),
    ],
    ids=["no rows", "no tokens", "one dimension"],
)
def test_a_batch_that_is_none_is_refused(
    model: Any, tmp_path: Path, routed: bool, ids: torch.Tensor, sentence: str
) -> None:
    if routed:
        wrap(model, "layerroute", gates=HALF)
    with pytest.raises(InputError, match=sentence), record(model, out=tmp_path / "r"):
        model(ids)
    assert Run(tmp_path / "r").state == "failed"
    model(torch.tensor(prompts_of([4])))  # the model is left as it was


def test_a_cache_of_fixed_size_is_named(model: Any, tmp_path: Path) -> None:
    ids = torch.tensor(prompts_of([6]))
    with (
        pytest.raises(InputError, match=r"must be 2-D .* got \(.*cache of fixed size .* DynamicCache"),
        record(model, out=tmp_path / "r"),
    ):
        model.generate(ids, max_new_tokens=2, cache_implementation="static", do_sample=False, pad_token_id=0)


def test_forwards_of_two_threads_at_once_are_refused_and_the_session_fails(model: Any, tmp_path: Path) -> None:
    ids, entered, go_on = torch.tensor(prompts_of([6])), threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        entered.set()
        go_on.wait(30)

    def together() -> None:
        with record(model, out=tmp_path / "r"):
            hook = model.model.layers[0].register_forward_pre_hook(wait)
            first = threading.Thread(target=model, args=(ids,))
            first.start()
            assert entered.wait(30)
            with pytest.raises(InputError, match="put a lock around the call"):
                model(ids)
            hook.remove()
            go_on.set()
            first.join()
            model(ids)  # one at a time again

    with pytest.raises(InputError, match="forwards of several threads ran at once"):
        together()
    run = Run(tmp_path / "r")
    assert (run.state, "several threads" in str(run.manifest.state_detail)) == ("failed", True)
    assert len(run.frame("steps")) == 1
    assert hooks(model) == 0


def test_forwards_of_several_threads_one_after_the_other_are_recorded(model: Any, tmp_path: Path) -> None:
    ids = torch.tensor(prompts_of([6]))
    with record(model, out=tmp_path / "r"):
        for _ in range(2):
            thread = threading.Thread(target=model, args=(ids,))
            thread.start()
            thread.join()
    assert len(Run(tmp_path / "r").frame("steps")) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_closes_the_folder_as_interrupted(model: Any, tmp_path: Path, number: int) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def loop() -> None:
        with record(model, out=tmp_path / "r"):
            model(torch.tensor(prompts_of([6])))
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        loop()
    run = Run(tmp_path / "r")
    assert (run.state, len(run.frame("steps"))) == ("interrupted", 1)
    assert signal.getsignal(signal.SIGTERM) is before
