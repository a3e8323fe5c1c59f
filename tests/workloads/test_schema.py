"""The committed JSON Schema: the same as the models say, complete, and it agrees with them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from workloads import schema
from workloads.loading import builtin_specs, load
from workloads.spec import Spec


def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(schema.PATH.read_text(encoding="utf-8"))
    return found


def test_the_committed_schema_is_what_the_models_say() -> None:
    found = committed()
    assert found.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert found == Spec.model_json_schema(), "run `python -m workloads.schema`"


def test_writing_it_again_changes_nothing(tmp_path: Path) -> None:
    schema.write(tmp_path / "s.json")
    assert (tmp_path / "s.json").read_bytes() == schema.PATH.read_bytes()


def test_every_section_and_field_has_a_title_and_a_description() -> None:
    found = committed()
    sections = [found, *found["$defs"].values()]
    assert len(sections) == 13
    for section in sections:
        assert section["title"]
        assert section["description"]
        for name, field in section["properties"].items():
            # A field that is a section has that section's own, unless it says something else.
            section_of = re.search(r"#/\$defs/(\w+)", json.dumps(field))
            own = {**(found["$defs"][section_of[1]] if section_of else {}), **field}
            assert own["title"], f"{section['title']}.{name}"
            assert own["description"], f"{section['title']}.{name}"


def test_built_in_specs_and_resolved_ones_fit_it() -> None:
    validator = jsonschema.Draft202012Validator(committed())
    for name, path in builtin_specs().items():
        validator.validate(yaml.safe_load(path.read_text()))
        validator.validate(yaml.safe_load(load(name).to_yaml()))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("modle",), 1),
        (("measure", "seed"), -1),
        (("cells", "prefill", "batch"), [0]),
        (("arms",), []),
        (("name",), "a/b"),
    ],
)
def test_it_refuses_what_the_models_refuse(place: tuple[str, ...], value: object) -> None:
    data = yaml.safe_load(builtin_specs()["tiny"].read_text())
    node = data
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    assert list(jsonschema.Draft202012Validator(committed()).iter_errors(data))


def test_an_arm_may_have_more_keys_and_nothing_else_may() -> None:
    found = committed()
    open_sections = [s["title"] for s in [found, *found["$defs"].values()] if s["additionalProperties"]]
    assert open_sections == ["ArmSpec"]


def test_the_entry_point_writes_the_same_file(tmp_path: Path) -> None:
    target = tmp_path / "s.json"
    command = [sys.executable, "-m", "workloads.schema", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert (done.stdout, done.stderr) == ("", f"wrote {target}\n")
    assert target.read_bytes() == schema.PATH.read_bytes()
