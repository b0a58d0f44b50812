"""The keys of `rljob plan --json` and the types of their values, compared with a golden list and with the page.

If this test fails, programs that read the document may fail, too. Add keys freely and raise the minor version of
`formatVersion`. Removing or renaming a key, or changing its type, needs a new major version. Then change
`golden/plan_document.txt` and the tables in docs/planning.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rljob_testing.pages import REPOSITORY

pytestmark = pytest.mark.usefixtures("empty_home")

Rljob = Callable[..., tuple[int, str, str]]
Keys = Mapping[str, str]

GOLDEN = Path(__file__).parent / "golden" / "plan_document.txt"
PAGE = REPOSITORY / "docs" / "planning.md"
JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: grpo}
spec:
  pools:
  - {name: main, nodes: 1, gpusPerNode: 8}
  training:
    steps: 100
    batchSize: 128
    model: {source: MODEL, gradientCheckpointing: Never}
    dataset: {type: File, file: {path: rows.jsonl}, maxPromptTokens: 1024}
    rewards: [{type: MathAnswer}]
    rollout: {groupSize: 8, maxNewTokens: 4096}
    algorithm: {kl: {coefficient: 0.001}}
"""
MAPS = ("phases", "layouts", "models")
"""Objects whose keys are names of pools or roles. The list has `*` in their place."""
PLAN_OF_A_CANDIDATE = re.compile(r"^search\.(?:candidates\[\]|bestSupported)\.plan\.")
"""Each placement that a search found has a plan with the keys of the whole plan. The list has them once."""
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def values_of(value: object, path: str = "", name: str = "") -> Iterator[tuple[str, str]]:
    """Every path of a JSON value with its type: `("phases.*[].total", "integer")`."""
    if isinstance(value, dict):
        for key, each in value.items():
            step = "*" if name in MAPS else key
            yield from values_of(each, f"{path}.{step}" if path else step, key)
    elif isinstance(value, list):
        for each in value:
            yield from values_of(each, f"{path}[]")
    else:
        yield path, TYPES[type(value)]


def keys_of(*documents: object) -> Keys:
    """The paths of some documents, each with all types that its values have: `string or null`."""
    found: dict[str, set[str]] = {}
    for document in documents:
        for path, kind in values_of(document):
            found.setdefault(PLAN_OF_A_CANDIDATE.sub("", path), set()).add(kind)
    return {path: " or ".join(sorted(types, key="null".__eq__)) for path, types in found.items()}


@pytest.fixture
def plan(rljob: Rljob, tmp_path: Path) -> Callable[..., dict[str, object]]:
    """Runs `rljob plan --json` for a model and returns the document."""

    def run(model: str, *arguments: str) -> dict[str, object]:
        file = tmp_path / "job.yaml"
        file.write_text(JOB.replace("MODEL", model))
        code, output, errors = rljob("plan", str(file), "--json", *arguments)
        assert (code, errors) == (1, "")  # the jobs do not fit, so that proposals and changes are in the documents
        document = json.loads(output)
        assert isinstance(document, dict)
        return document

    return run


@pytest.fixture
def documents(plan: Callable[..., dict[str, object]]) -> list[dict[str, object]]:
    """A plan with changes that make the job fit, one with a nearest miss, and a search. Together they have all keys."""
    return [
        plan("Qwen/Qwen3-8B", "--gpu", "H100"),
        plan("meta-llama/Llama-3.1-405B", "--gpu", "L4"),
        plan("Qwen/Qwen3-8B", "--cluster", "2x8xH100", "--search"),
    ]


def test_keys_and_types_are_those_of_the_golden_list(documents: list[dict[str, object]]) -> None:
    for document in documents:
        assert (document["formatVersion"], document["kind"]) == ("1.1", "Plan")
    lines = [f"{path} {types}" for path, types in keys_of(*documents).items()]
    assert sorted(lines) == GOLDEN.read_text().splitlines()


def test_the_page_explains_every_key() -> None:
    _, found, rest = PAGE.read_text().partition("\n## The JSON document\n")
    assert found
    section = rest.partition("\n## ")[0]
    explained = set(re.findall(r"`([A-Za-z]+)[^`]*`", section))
    paths = [line.split()[0] for line in GOLDEN.read_text().splitlines()]
    named = {name.removesuffix("[]") for path in paths for name in path.split(".")} - {"*"}
    assert named - explained == set()
