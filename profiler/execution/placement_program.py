"""The mixed-integer program behind `placement.exact`, and its solution by HiGHS through SciPy.

Minimise t with Σ_r x_er = 1 for each expert, Σ_e load_e·x_er ≤ t and Σ_e width_e·x_er ≤ cap for each rank, x binary
(METHODS section 3, "Placement"). Not here: what is done with a solution, or without one.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Solution:
    """`rank_E`: rank of each expert, None where none was found. `bound`: no largest load is below it.

    `proven`: the search came to its end, so that nothing is better, or that nothing is within the limits at all.
    """

    rank_E: Ints | None
    bound: float
    proven: bool


_stdout_taken = threading.Lock()


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """File descriptor 1 leads nowhere in this block: HiGHS prints to it from C++, whatever it is told.

    One thread at a time, or the one might restore what the other had put there.
    """
    flush = ctypes.CDLL(None).fflush  # what C has buffered goes where descriptor 1 leads when it is flushed
    with _stdout_taken, ExitStack() as after:
        with suppress(OSError):  # descriptor 1 is closed: nothing can be printed
            kept = os.dup(1)
            after.callback(os.close, kept)
            after.callback(os.dup2, kept, 1)
            after.callback(flush, None)
            flush(None)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)
        yield


def solve(load_E: Ints, width_E: Ints, ranks: int, cap: int, *, at_most: int | None, time_limit_s: float) -> Solution:
    """Experts to ranks with the smallest largest load.

    Args:
        load_E: tokens × width of each expert.
        width_E: widths.
        ranks: R.
        cap: most width a rank may hold.
        at_most: a largest load that is known to be possible, for SciPy's interface takes no first solution.
        time_limit_s: seconds. A search that ends by the clock depends on the machine; any other does not.

    Variables are x, experts by falling load × ranks, then t. Ranks are alike, so the k-th expert may be kept to the
    first k + 1 of them. Loads are divided by their mean over ranks, so that HiGHS' absolute tolerances are relative.
    """
    experts = len(load_E)
    order = np.argsort(-load_E, kind="stable")
    mean = float(load_E.sum()) / ranks or 1.0
    work, width = load_E[order] / mean, width_E[order]
    each_rank = sparse.identity(ranks)
    t = sparse.csr_array(np.ones((ranks, 1)))
    once = sparse.hstack([sparse.kron(sparse.identity(experts), np.ones((1, ranks))), np.zeros((experts, 1))])
    carried = sparse.hstack([sparse.kron(work[None], each_rank), -t])
    held = sparse.hstack([sparse.kron(width[None], each_rank), 0 * t])
    with _quiet_stdout():
        solved = optimize.milp(
            np.append(np.zeros(experts * ranks), 1.0),
            integrality=np.append(np.ones(experts * ranks), 0),
            bounds=optimize.Bounds(
                np.append(np.zeros(experts * ranks), max(1.0, work[0])),
                np.append(np.tri(experts, ranks).ravel(), math.inf if at_most is None else at_most / mean),
            ),
            constraints=[
                optimize.LinearConstraint(once.tocsr(), 1, 1),
                optimize.LinearConstraint(carried.tocsr(), -math.inf, 0),
                # Sums of widths are whole numbers: half of one more lets no more in, and no rounding keeps one out.
                optimize.LinearConstraint(held.tocsr(), -math.inf, cap + 0.5),
            ],
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
    # Status 0: optimal; 2: infeasible. HiGHS then has nothing left to search.
    proven = solved.status in (0, 2)
    bound = mean * (1.0 if solved.mip_dual_bound is None else max(1.0, float(solved.mip_dual_bound)))
    if solved.x is None:
        return Solution(None, bound, proven)
    rank_E = np.empty(experts, np.int64)
    rank_E[order] = solved.x[:-1].reshape(experts, ranks).argmax(1)
    return Solution(rank_E, bound, proven)
