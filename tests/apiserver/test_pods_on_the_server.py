"""What RLJob takes and refuses in the parts of a job that end in its pods, against what a real API server says of pods
made from the same parts."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import HealthCheck, given, note, settings
from pydantic import ValidationError

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.objects import Manifest
from rljob_testing.doubtful_pods import EDITS, Edits, job_with, pods_of, raw_pods_of
from rljob_testing.operator_jobs import specs
from rljob_testing.rljob_client import create

pytestmark = pytest.mark.apiserver

PODS = "/api/v1/namespaces/default/pods"
HEAD = "spec.head."
NODES = [{"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["-"]}]}}]
WISH = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": NODES}}

STRICTER: list[Edits] = [
    # The API server takes the pods; they would wait for ever, fail on their node, or say what they do not mean.
    {HEAD + "resources": {"limits": {"kubernetes.io/gpu": 1}}},
    {HEAD + "resources": {"limits": {"rdma/hca": "1k"}}},
    {HEAD + "resources": {"limits": {"memory": "Ki"}}},
    {HEAD + "resources": {"limits": {"memory": "-0"}}},
    {HEAD + "resources": {"limits": {"memory": "1e100"}}},
    {"spec.pools[0].gpuResource": "cpu"},
    {HEAD + "template.tolerations": [{"key": "", "operator": "Exists"}]},
    {HEAD + "template.tolerations": [{"effect": "NoExecute", "operator": "Exists", "tolerationSeconds": -1}]},
    {HEAD + "template.tolerations": [{"key": f"{'d.' * 126}d/n", "operator": "Exists"}]},
    {HEAD + "template.affinity": WISH},
    {"spec.env": [{"name": "a b", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]},
]


def refusals(http: httpx.Client, pods: list[Manifest]) -> list[str]:
    """Why the server takes some of these pods not."""
    found = []
    for pod in pods:
        answer = http.post(PODS, params={"dryRun": "All", "fieldValidation": "Strict"}, json=pod)
        if answer.status_code != 201:
            assert answer.status_code in (400, 422), answer.text
            found.append(str(answer.json()["message"]))
    return found


def spec_or_reason(edits: Edits) -> RLJobSpec | str:
    try:
        return RLJob.from_wire(job_with(edits)).spec
    except ValidationError as error:
        return str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EDITS)
def test_types_schema_and_pods_have_one_verdict(api: httpx.Client, edits: Edits) -> None:
    ours = spec_or_reason(edits)
    of_pods = refusals(api, raw_pods_of(edits) if isinstance(ours, str) else pods_of(ours))
    note(f"ours: {ours if isinstance(ours, str) else 'valid'}\npods: {of_pods or 'taken'}")
    assert isinstance(ours, str) == bool(of_pods)
    answer = create(api, job_with(edits))
    note(f"job: {answer.message or 'taken'}")
    if "hugepages-2Mi" in str(edits):
        # In CEL amounts of huge pages are not compared (`resource_rules`); the operator refuses these jobs at once.
        assert answer.status == 201 or bool(of_pods)
    else:
        assert (answer.status != 201) == bool(of_pods)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_the_pods_of_any_valid_job_are_taken(apiserver_with_classes: httpx.Client, spec: RLJobSpec) -> None:
    assert refusals(apiserver_with_classes, pods_of(spec)) == []


@pytest.mark.parametrize("edits", STRICTER, ids=str)
def test_where_rljob_is_stricter_the_pods_would_be_taken(api: httpx.Client, edits: Edits) -> None:
    assert isinstance(spec_or_reason(edits), str)
    assert create(api, job_with(edits)).status == 422
    assert refusals(api, raw_pods_of(edits)) == []
