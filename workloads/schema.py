"""The JSON Schema of a spec, for editors: `python -m workloads.schema [PATH]` writes `spec.schema.json` anew.

A test holds the committed file to what the models say.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from workloads.spec import Spec

PATH = Path(__file__).with_name("spec.schema.json")


def spec_schema() -> dict[str, Any]:
    """`Spec.model_json_schema()`, and the dialect it is written in."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}


def write(path: Path = PATH) -> None:
    """Write the schema to `path`."""
    path.write_text(json.dumps(spec_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    write(target)
    print(f"wrote {target}", file=sys.stderr)
