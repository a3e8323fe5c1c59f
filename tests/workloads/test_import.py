"""Reading a spec costs little: no torch, and well under a third of a second."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
start = time.process_time()
import workloads.spec
took = time.process_time() - start
import workloads.loading, workloads.prompts, workloads.schema
heavy = {"torch", "transformers", "numpy", "pandas", "pyarrow", "scipy"} & set(sys.modules)
print(took, *heavy)
"""


def test_workloads_imports_fast_and_nothing_heavy() -> None:
    # Processor time, and the best of three: other work on the machine is not the import's.
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.split() for _ in range(3)
    ]
    assert all(len(run) == 1 for run in runs), runs
    assert min(float(run[0]) for run in runs) < 0.3
