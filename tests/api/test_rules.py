"""Every rule: the table of good and bad jobs through pydantic, and the form of the messages."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rljob_api.v1alpha1.job import RULE_ERROR, RLJob
from rljob_api.v1alpha1.rules import MUTABLE_SPEC_FIELDS, RULES, immutable_changes, violations
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.yaml_text import wire_path
from rljob_testing.jobs import rule_examples
from rljob_testing.jobs.valid_job import Bad, valid_job

GOOD_CASES = [(name, edits) for name, examples in rule_examples.GOOD.items() for edits in examples]
BAD_CASES = [(name, bad) for name, examples in rule_examples.BAD.items() for bad in examples]


def test_every_rule_has_good_and_bad_examples() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(names) == set(rule_examples.GOOD) == set(rule_examples.BAD)


@pytest.mark.parametrize(("rule", "edits"), GOOD_CASES, ids=[name for name, _ in GOOD_CASES])
def test_a_good_example_is_accepted(rule: str, edits: dict[str, object]) -> None:
    job = RLJob.from_wire(valid_job(edits))
    assert rule not in {found.rule for found in violations(job)}


@pytest.mark.parametrize(("rule", "bad"), BAD_CASES, ids=[name for name, _ in BAD_CASES])
def test_a_bad_example_breaks_its_rule_at_its_path_and_no_other(rule: str, bad: Bad) -> None:
    with pytest.raises(ValidationError) as caught:
        RLJob.from_wire(valid_job(bad.edits))
    errors = caught.value.errors()
    assert {error["type"] for error in errors} == {RULE_ERROR}
    assert {error["ctx"]["rule"] for error in errors} == {rule, *bad.also}
    found = [error for error in errors if error["ctx"]["rule"] == rule]
    assert [wire_path(error["loc"]) for error in found] == list(bad.places or [bad.path])
    message = next(each.message for each in RULES if each.name == rule)
    assert all(error["msg"].startswith(message) for error in found)


@pytest.mark.parametrize(
    ("resources", "rule", "kind"),
    [
        (
            {"requests": {"hugepages-2Mi": "2Mi"}, "limits": {"hugepages-2Mi": "4Mi", "cpu": 1}},
            "requestEqualsLimit",
            "requests",
        ),
        ({"limits": {"hugepages-64Ki": "65Ki", "cpu": 1}}, "pageSize", "limits"),
    ],
)
def test_requests_of_huge_pages_are_compared_although_cel_cannot(
    resources: dict[str, object], rule: str, kind: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        RLJob.from_wire(valid_job({"spec.head.resources": resources}))
    [error] = caught.value.errors()
    assert error["ctx"]["rule"] == f"Resources.{rule}"
    assert wire_path(error["loc"]).startswith(f"spec.head.resources.{kind}.hugepages-")


def test_all_violations_are_reported_together() -> None:
    edits = {"spec.training.rollout.groupSize": 1, "spec.training.batchSize": 7, "metadata.name": "UPPER"}
    with pytest.raises(ValidationError) as caught:
        RLJob.from_wire(valid_job(edits))
    assert [wire_path(error["loc"]) for error in caught.value.errors()] == [
        "metadata.name",
        "spec.training.batchSize",
        "spec.training.rollout.groupSize",
    ]


def test_a_violation_names_the_mistake_the_value_and_the_fix() -> None:
    spec = RLJob.from_wire(valid_job()).spec
    training = spec.training.model_copy(
        update={"batch_size": 9, "rollout": spec.training.rollout.model_copy(update={"group_size": 3})}
    )
    (found,) = violations(spec.model_copy(update={"training": training}), ("spec",))
    assert wire_path(found.path) == "spec.training.batchSize"
    wrong, advice = found.message.split(" (seen: 9); ")
    assert wrong.startswith("batchSize x rollout.groupSize x roles.actor.sequenceParallel")
    assert "must be divisible by the number of GPUs" in wrong
    assert advice.startswith("change one of these numbers")
    assert "9 x 3 x 1 = 27" in advice


def _spec(edits: dict[str, object]) -> RLJobSpec:
    return RLJob.from_wire(valid_job(edits)).spec


def test_only_suspend_and_run_policy_may_change() -> None:
    old = _spec({})
    assert immutable_changes(old, _spec({"spec.runPolicy.cleanup": "KeepCluster", "spec.suspend": True})) == ()
    changed = immutable_changes(old, _spec({"spec.training.steps": 11, "spec.image": "x", "spec.code.imagePath": "/c"}))
    assert [wire_path(found.path) for found in changed] == ["spec.image", "spec.code", "spec.training"]
    assert MUTABLE_SPEC_FIELDS == ("suspend", "run_policy")


def test_an_explicit_default_is_no_change() -> None:
    assert immutable_changes(_spec({}), _spec({"spec.training.seed": 0, "spec.env": [], "spec.code": None})) == ()


def test_no_error_shows_a_secret() -> None:
    job = valid_job({"spec.env": [{"name": "HF_TOKEN", "value": "hf_SECRETVALUE"}]})
    with pytest.raises(ValidationError) as caught:
        RLJob.from_wire(job)
    [error] = caught.value.errors()
    assert error["loc"] == ("spec", "env", 0, "value")
    assert "SECRETVALUE" not in str(caught.value)
