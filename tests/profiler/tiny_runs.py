"""Specs on the `tiny` preset that take a second or two, and what tests of runs ask of a folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from workloads.spec import Spec

#: The `tiny` preset by hand: 6 layers, width 64, FFN 192, 4 heads of 16 on 2 key/value heads, 259 tokens, tied head.
LAYERS, WIDTH, FFN, HEADS, HEAD, KV_HEADS, VOCABULARY = 6, 64, 192, 4, 16, 2, 259
ATTENTION_FLOPS = 2 * (2 * WIDTH * HEADS * HEAD + 2 * WIDTH * KV_HEADS * HEAD)
FFN_FLOPS = 2 * 3 * WIDTH * FFN
CONTEXT_FLOPS = 4 * HEADS * HEAD
HEAD_FLOPS = 2 * WIDTH * VOCABULARY


def tiny_spec(**more: Any) -> Spec:
    """Dense, dense again, a forced route and an untrained router; a prefill and a decode cell; traced."""
    given: dict[str, Any] = {
        "name": "tiny-run",
        "model": {"source": "tiny", "device": "cpu"},
        "arms": [
            {"name": "dense", "method": "dense"},
            {"name": "again", "method": "dense", "twin": "dense"},
            {"name": "forced", "method": "layerroute", "gates": {"forced": {"ratio": 0.3, "pattern": "random"}}},
            {"name": "untrained", "method": "layerroute"},
        ],
        "cells": {
            "prefill": {"batch": [2], "length": [16]},
            "decode": {"batch": [3], "context": [12], "new_tokens": 2},
        },
        "measure": {"warmup": 1, "max_repeats": 4, "min_repeats": 3, "target_ci": 0.0001, "budget_s": 60, "threads": 1},
    }
    return Spec.model_validate(given | more)


def parquet_and_other_bytes(folder: Path) -> bytes:
    """All that a folder holds, with what is compressed laid open, so that a text in it can be looked for."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found.append(path.read_bytes())
        if path.suffix == ".parquet":
            found.append(json.dumps(pq.read_table(path).to_pylist(), default=str, ensure_ascii=False).encode())
        elif path.suffix == ".gz":
            found.append(gzip.decompress(path.read_bytes()))
    return b"\n".join(found)


def contents(folder: Path) -> Mapping[str, bytes]:
    """Name → bytes of every file."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
