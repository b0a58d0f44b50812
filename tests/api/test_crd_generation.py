"""What is generated from the types: up to date in the repository, and in forms that a CRD may have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_api.crdgen.__main__ import main
from rljob_api.crdgen.manifest import custom_resource_definition, manifest_text
from rljob_api.crdgen.structural import root_schema
from rljob_api.v1alpha1.rules import RULES


def schemas(schema: object, path: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Every schema in a schema, with its path."""
    assert isinstance(schema, dict)
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from schemas(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from schemas(schema[key], f"{path}.{key}")


def test_the_committed_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_drift_is_found_and_the_error_says_which_command_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 0
    changed = tmp_path / "crds" / "rljobs.yaml"
    changed.write_text(changed.read_text().replace("maximum: 1024", "maximum: 1025"))
    assert main(["--root", str(tmp_path), "--check"]) == 1
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith(f"{changed}: ")
    assert "run `python -m rljob_api.crdgen`" in message


def test_the_yaml_text_is_the_definition() -> None:
    assert YAML(typ="safe", pure=True).load(manifest_text()) == custom_resource_definition()


def test_all_strings_lists_and_maps_of_the_spec_are_bounded() -> None:
    # The API server estimates the cost of rules from these bounds.
    unbounded = []
    for path, schema in schemas(root_schema()["properties"]["spec"], "spec"):  # type: ignore[index]
        bound = {"string": "maxLength", "array": "maxItems"}.get(str(schema.get("type")))
        if "additionalProperties" in schema or "x-kubernetes-preserve-unknown-fields" in schema:
            bound = "maxProperties"
        if bound is not None and bound not in schema and "enum" not in schema:
            unbounded.append(path)
    assert unbounded == []


def test_every_rule_is_in_the_definition() -> None:
    written = set()
    for _, schema in schemas(root_schema()):
        validations = schema.get("x-kubernetes-validations", [])
        assert isinstance(validations, list)
        # Rules that are checked only at the creation of a job.
        written |= {each["rule"].removeprefix("oldSelf.hasValue() || (").removesuffix(")") for each in validations}
        written |= {each["rule"] for each in validations}
    assert {rule.cel for rule in RULES} <= written


def test_fields_below_an_affinity_have_no_descriptions() -> None:
    below = ".spec.pools.items.template.affinity"
    described = [path for path, schema in schemas(root_schema()) if path.startswith(below) and "description" in schema]
    assert described == [below]


def test_the_affinity_of_the_head_may_have_any_fields() -> None:
    by_path = dict(schemas(root_schema()))
    assert by_path[".spec.head.template.affinity"] == {
        "type": "object",
        "maxProperties": 3,
        "x-kubernetes-preserve-unknown-fields": True,
    }
    assert "properties" in by_path[".spec.pools.items.template.affinity"]


def test_records_of_the_operator_have_no_descriptions_within() -> None:
    by_path = dict(schemas(root_schema()))
    for name in ("attempts", "counters", "nextAttempt", "handledRequests"):
        path = f".status.{name}"
        assert "description" in by_path[path]
        within = [each for each in by_path if each.startswith(f"{path}.") and each != f"{path}.items"]
        assert within
        assert not [each for each in within if "description" in by_path[each]]


def test_a_field_that_refers_to_another_one_has_only_fields_that_are_described_there() -> None:
    by_path = dict(schemas(root_schema()))
    mark = " The fields are described at "
    found = {}
    for path, schema in by_path.items():
        if mark in (text := str(schema.get("description", ""))):
            found[path] = "." + text.partition(mark)[2].rstrip(".").replace("pools.", "pools.items.")
            found[path] = found[path].replace("spec.env.", "spec.env.items.").replace("envFrom.", "envFrom.items.")
    assert found[".spec.training.evaluations.items.dataset"] == ".spec.training.dataset"
    assert len(found) == 11
    for path, other in found.items():
        # A field that refers to a third one, as `model` of `ref` does, is checked by itself.
        others = tuple(each for each in found if each.startswith(f"{path}."))
        within = {
            each.removeprefix(path) for each in by_path if each.startswith(f"{path}.") and not each.startswith(others)
        }
        assert within
        assert within <= {each.removeprefix(other) for each in by_path if each.startswith(f"{other}.")}
        assert not [each for each in within if "description" in by_path[path + each]]
        first_level = [each for each in within if each.count(".") == 1 and each != ".gpuResource"]
        assert all("description" in by_path[other + each] for each in first_level)


def test_number_bounds_quantities_and_free_maps_take_their_kubernetes_form() -> None:
    by_path = dict(schemas(root_schema()))
    rate = dict(by_path[".spec.training.optimizer.learningRate"])
    del rate["description"]
    assert rate == {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1e12, "default": 1e-06}
    shared = by_path[".spec.pools.items.sharedMemory"]
    assert shared["x-kubernetes-int-or-string"] is True
    assert "type" not in shared
    config = by_path[".spec.training.dataset.reasoningGym.config"]
    assert config["x-kubernetes-preserve-unknown-fields"] is True
    assert by_path[".spec.training.algorithm.loss.clipped.dualClipRatio"]["minimum"] == 0
    for schema in by_path.values():
        least = schema.get("minimum", 0)
        assert isinstance(least, int | float)
        assert least == int(least) or f"self >= {least}" in str(schema["x-kubernetes-validations"])
    assert by_path[".spec.env"]["x-kubernetes-list-map-keys"] == ["name"]
