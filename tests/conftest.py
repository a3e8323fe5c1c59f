"""Settings every test runs under: nothing reaches a network, and a busy machine does not make a test flaky."""

from __future__ import annotations

import os
import signal

import hypothesis

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # What a shell without job control starts in the background is born deaf to it, and so are tests of interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("gatewise", deadline=None, derandomize=True)
hypothesis.settings.load_profile("gatewise")
