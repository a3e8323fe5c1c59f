"""The built-in study of ten seeds, for real: a minute or two on one core, so among the slow tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.spread import BEYOND_CHANCE, BY_CHANCE, NOT_STABLE, PARTLY, SKIPPED, STABLE
from analysis.study import compare
from profiler.study_folder import Study, training_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_ten_seeds_killed_once_and_gone_on_with(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "profiler", "run", "layerroute-seeds-tiny", "--out", "study", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "study"
    first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not (training_folder(folder, 2) / "state").is_dir():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert Study(folder).done == [0, 1]

    second = subprocess.run([*command, "--resume"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["study"] == "study"
    found = compare(Study(folder))
    assert found.seeds == list(range(10))
    assert len(found.pairs) == 10 * 9 / 2
    # Gates of the arm with LoRA alone are open, so it skips nothing with any seed; its quality follows the training.
    lora = found.lines[(found.lines["arm"] == "lora") & (found.lines["figure"] == SKIPPED)]
    assert lora["highest"].tolist() == [0, 0, 0]
    assert set(lora["verdict"]) == {STABLE}
    # At this rate of learning seeds come to skip different layers: that is what the study is there to show.
    routed = found.lines[found.lines["arm"] == "routed"].set_index("figure")
    assert routed.loc["layers ever skipped", "verdict"] == NOT_STABLE
    assert routed.loc["inputs decided alike", "verdict"] in (BEYOND_CHANCE, PARTLY, BY_CHANCE)
    assert len(set(found.patterns["ever_skipped"])) > 1
    assert set(found.lines["part"]) == {"pattern", "speed", "quality"}
    assert (found.lines["seeds"] == 10).all()
