"""Settings every test runs under: nothing reaches a network, and a busy machine does not make a test flaky."""

from __future__ import annotations

import os

import hypothesis

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

hypothesis.settings.register_profile("gatewise", deadline=None, derandomize=True)
hypothesis.settings.load_profile("gatewise")
