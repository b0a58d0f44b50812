"""`$(NAME)` references in a job's variables, as `rljob run` replaces them."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.job import RLJob
from rljob_cli.errors import CliError
from rljob_cli.local.run import job_variables
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions

ON_A_CLUSTER = [
    ("x", "x"),
    ("$(FIRST)/$(SECOND)", "1/a 1"),
    ("$$(FIRST) $$$(FIRST) $FIRST ${FIRST} $", "$(FIRST) $1 $FIRST ${FIRST} $"),
    ("$(LATER) $(HOME) $(NOWHERE", "$(LATER) $(HOME) $(NOWHERE"),
    ("$(LAST) $( FIRST) $()", "$(LAST) $( FIRST) $()"),
    ("$($(FIRST))", "$($(FIRST))"),
    ("$(KEPT)", "exported"),
    ("$(UNSET)", "$(UNSET)"),
    ("$(MAP_a) $(MAP_b) $(OTHER)", "mapped $(MAP_b) $(OTHER)"),
    ("$(RLJOB_RUN_FOLDER)/logs", "/runs/x/logs"),
]
"""Values of a job's variable LAST, and what the kubelet makes of them; where a Secret or ConfigMap would have a value,
the user has exported it."""


@pytest.mark.parametrize(("value", "expected"), ON_A_CLUSTER)
def test_references_in_variables_mean_the_same_as_on_a_cluster(value: str, expected: str) -> None:
    reference = {"name": "some", "key": "key"}
    env = [
        {"name": "FIRST", "value": "1"},
        {"name": "SECOND", "value": "a $(FIRST)"},
        {"name": "KEPT", "valueFrom": {"secretKeyRef": reference}},
        {"name": "UNSET", "valueFrom": {"configMapKeyRef": {**reference, "optional": True}}},
        {"name": "LAST", "value": value},
        {"name": "LATER", "value": "z"},
    ]
    env_from = [{"prefix": "MAP_", "configMapRef": {"name": "some"}}]
    spec = RLJob.from_wire(valid_job({"spec.env": env, "spec.envFrom": env_from})).spec
    exported = {"KEPT": "exported", "HOME": "/home/me", "MAP_a": "mapped", "OTHER": "unseen", "FIRST": "exported, too"}
    assert job_variables(spec, {"RLJOB_RUN_FOLDER": "/runs/x"}, exported) == {
        "FIRST": "1",
        "SECOND": "a 1",
        "LAST": expected,
        "LATER": "z",
    }


def test_a_reference_to_a_secret_that_is_not_exported_is_rejected() -> None:
    env = [
        {"name": "EARLY", "value": "$(P)"},
        {"name": "P", "valueFrom": {"secretKeyRef": {"name": "some", "key": "key"}}},
        {"name": "PLAIN", "value": "exit-$$(P)"},
        {"name": "REFERS", "value": "exit-$(P)"},
    ]
    spec = RLJob.from_wire(valid_job({"spec.env": env})).spec
    with pytest.raises(CliError) as caught:
        job_variables(spec, {}, {})
    assert str(caught.value) == Mentions("spec.env[3].value:", "$(P)", "Secret or ConfigMap", "`rljob run`", "export P")
    expected = {"EARLY": "$(P)", "PLAIN": "exit-$(P)", "REFERS": "exit-75"}
    assert job_variables(spec, {}, {"P": "75"}) == expected


@pytest.mark.parametrize(("name", "expected"), [("HOME", "/home/me"), ("RLJOB_POD_NAME", "$(RLJOB_POD_NAME)")])
def test_a_source_without_a_prefix_may_have_any_key_except_those_that_rljob_sets(name: str, expected: str) -> None:
    edits = {"spec.env": [{"name": "A", "value": f"$({name})"}], "spec.envFrom": [{"secretRef": {"name": "some"}}]}
    spec = RLJob.from_wire(valid_job(edits)).spec
    assert job_variables(spec, {}, {"HOME": "/home/me", "RLJOB_POD_NAME": "mine"}) == {"A": expected}
