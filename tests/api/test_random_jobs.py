"""For any text in a job file, the result is a job or a list of problems, never a traceback."""

from __future__ import annotations

import copy
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_api.errors import JobFileError, Problem
from rljob_api.job_file import load_job_text
from rljob_api.yaml_text import read_yaml, to_yaml
from rljob_testing.jobs.valid_job import valid_job

FULL = valid_job(
    {
        "spec.env": [{"name": "A", "value": "1"}],
        "spec.volumes": [{"name": "s", "mountPath": "/s", "type": "EmptyDir", "emptyDir": {"sizeLimit": "1Gi"}}],
        "spec.pools[0].template.tolerations": [{"key": "gpu", "operator": "Exists"}],
        "spec.training.evaluations[0].dataset": {
            "type": "ReasoningGym",
            "reasoningGym": {"task": "t", "config": {"a": [1]}},
        },
        "spec.roles.rollout.tensorParallel": 1,
        "spec.training.optimizer.warmupSteps": 1,
    },
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["File", "GRPO", "main", "head", "{prompt}", "nvidia.com/gpu", "a/../b", "9" * 400]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


def paths_in(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every value in a wire form."""
    children: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    return [path, *(child_path for key, child in children for child_path in paths_in(child, (*path, key)))]


def mutated(data: st.DataObject) -> object:
    """The full job with a few values replaced, added or removed."""
    document: object = copy.deepcopy(FULL)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths_in(document)))
        if not path:
            continue
        parent = document
        for part in path[:-1]:
            parent = parent[part]  # type: ignore[index]
        action = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "remove":
            del parent[path[-1]]  # type: ignore[attr-defined]
        elif action == "add" and isinstance(parent, dict):
            parent[data.draw(st.text(max_size=8))] = data.draw(VALUES)
        else:
            parent[path[-1]] = data.draw(VALUES)  # type: ignore[index]
    return document


def problems_in(text: str) -> tuple[Problem, ...]:
    try:
        load_job_text(text)
    except JobFileError as error:
        return error.problems
    return ()


def check(text: str) -> None:
    for problem in problems_in(text):
        assert problem.message
        assert problem.line is not None
        assert problem.line >= 1
        assert "Input should" not in problem.message


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_mutated_job_never_causes_a_traceback(data: st.DataObject) -> None:
    check(json.dumps(mutated(data)))


@settings(max_examples=300)
@given(st.data())
def test_damaged_text_never_causes_a_traceback(data: st.DataObject) -> None:
    text = json.dumps(FULL, indent=1)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    inserted = data.draw(st.text(alphabet=st.sampled_from("{}[]:,&*!|>'\"%@`#-? \n\tax0~é\x00\ud800"), max_size=6))
    check(text[:start] + inserted + text[end:])


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_any_text_never_causes_a_traceback(text: str) -> None:
    check(text)


WORDS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.sampled_from(
        ["yes", "on", "N", "010", "0o17", "0b1", "1_000", "1:30", "1e3", "~", "null", ".inf", "<<", "=", ""]
    ),
    st.text(alphabet="ab \n\t#:-'\"", max_size=200),
)


@settings(max_examples=300)
@given(WORDS, WORDS)
def test_any_written_text_is_read_again(key: str, value: str) -> None:
    written = {"labels": {key: value}, "list": [value, 1e-6]}
    assert read_yaml(to_yaml(written)).value == written
