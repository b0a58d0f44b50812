"""What RLJob accepts and rejects in the parts of a job that become pods, compared with a real API server's verdict on
pods made from the same parts."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import HealthCheck, example, given, note, settings
from pydantic import ValidationError

from rljob_api.job_checks import job_warnings
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.ownership import Manifest
from rljob_operator.raw_json import object_at
from rljob_testing.cluster import job_requests
from rljob_testing.operator import pod_edits
from rljob_testing.operator.any_spec import any_specs

pytestmark = pytest.mark.apiserver

PODS = "/api/v1/namespaces/default/pods"
HEAD = "spec.head."
POOL = "spec.pools[0]."
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
NODES = [{"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["-"]}]}}]
WISH = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": NODES}}
NO_NUMBER = [{"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["abc"]}]}]
GREATER = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": NO_NUMBER}}}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"

STRICTER: list[pod_edits.Edits] = [
    # The API server accepts the pods; they would wait for ever, fail on their node, or do something unintended.
    {HEAD + "resources": {"limits": {"kubernetes.io/gpu": 1}}},
    {HEAD + "resources": {"limits": {"rdma/hca": "1k"}}},
    {HEAD + "resources": {"limits": {"rdma/hca": 12345678901}}},
    {HEAD + "resources": {"limits": {"memory": "Ki"}}},
    {HEAD + "resources": {"limits": {"memory": "-0"}}},
    {HEAD + "resources": {"limits": {"memory": "1e100"}}},
    {"spec.pools[0].gpuResource": "cpu"},
    {HEAD + "template.tolerations": [{"key": "", "operator": "Exists"}]},
    {HEAD + "template.tolerations": [{"effect": "NoExecute", "operator": "Exists", "tolerationSeconds": -1}]},
    {HEAD + "template.tolerations": [{"key": f"{'d.' * 126}d/n", "operator": "Exists"}]},
    {HEAD + "template.tolerations": [{"key": "a", "operator": "Exists", "effect": ""}]},
    {HEAD + "template.schedulerName": "A"},
    {POOL + "template.affinity": WISH},
    {POOL + "template.affinity": GREATER},
    {HEAD + "template.annotations": {"controller.kubernetes.io/pod-deletion-cost": "10"}},
    {HEAD + "template.annotations": {"scheduler.alpha.kubernetes.io/tolerations": "[]"}},
    {HEAD + "template.annotations": {"seccomp.security.alpha.kubernetes.io/pod": "runtime/default"}},
    {HEAD + "template.annotations": {"container.seccomp.security.alpha.kubernetes.io/ray": "runtime/default"}},
    {"spec.env": [{"name": "a b", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]},
]


def rejections(http: httpx.Client, pods: list[Manifest]) -> list[str]:
    """Why the server rejects some of these pods."""
    found = []
    for pod in pods:
        answer = http.post(PODS, params={"dryRun": "All", "fieldValidation": "Strict"}, json=pod)
        if answer.status_code != 201:
            # 403: the class does not exist.
            assert answer.status_code in (400, 403, 422), answer.text
            found.append(str(answer.json()["message"]))
    return found


def spec_or_reason(edits: pod_edits.Edits) -> RLJobSpec | str:
    try:
        return RLJob.from_wire(pod_edits.job_with(edits)).spec
    except ValidationError as error:
        return str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pod_edits.EDITS)
# Values that are too rare to be found at random.
@example({HEAD + "resources": {"requests": {"memory": 2**53 + 1}, "limits": {"memory": 2**53}}})
@example({HEAD + "resources": {"requests": {"memory": str(2**53 + 1)}, "limits": {"memory": 2**53}}})
@example({HEAD + "resources": {"requests": {"memory": 2**53}, "limits": {"memory": str(2**53 + 1)}}})
@example({HEAD + "resources": {"requests": {"memory": 2**63 - 1}, "limits": {"memory": "16Ei"}}})
@example({HEAD + "resources": {"limits": {"rdma/hca": 999999999}}})
@example({HEAD + "resources": {"limits": {"hugepages-1Gi": 2**31, "cpu": 1}}})
@example({HEAD + "resources": {"limits": {"hugepages-1Gi": "1G", "cpu": 1}}})
@example({HEAD + "template.annotations": {APPARMOR + "ray": "runtime/default"}})
@example({HEAD + "template.annotations": {APPARMOR + "ray": "mine"}})
@example({HEAD + "template.annotations": {APPARMOR + "other": "unconfined"}})
@example({HEAD + "template.annotations": {"kubernetes.io/config.mirror": "a"}})
@example({HEAD + "template.annotations": {"controller.kubernetes.io/pod-deletion-cost": "high"}})
@example({HEAD + "template.annotations": {"seccomp.security.alpha.kubernetes.io/pod": "unconfined"}})
@example({HEAD + "template.priorityClassName": "A"})
def test_types_schema_and_pods_have_one_verdict(api: httpx.Client, edits: pod_edits.Edits) -> None:
    ours = spec_or_reason(edits)
    of_pods = rejections(api, pod_edits.raw_pods_of(edits) if isinstance(ours, str) else pod_edits.pods_of(ours))
    note(f"ours: {ours if isinstance(ours, str) else 'valid'}\npods: {of_pods or 'taken'}")
    assert isinstance(ours, str) == bool(of_pods)
    answer = job_requests.create(api, pod_edits.job_with(edits))
    note(f"job: {answer.message or 'taken'}")
    if "hugepages-2Mi" in str(edits):
        # CEL does not compare requests of huge pages with limits (`resources.py`); the operator rejects these jobs.
        assert answer.status == 201 or bool(of_pods)
    else:
        assert (answer.status != 201) == bool(of_pods)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_specs())
def test_the_pods_of_any_valid_job_are_accepted(apiserver_with_classes: httpx.Client, spec: RLJobSpec) -> None:
    assert rejections(apiserver_with_classes, pod_edits.pods_of(spec)) == []


SCHEDULERS = {
    "volcano": {"volcano.sh/queue-name": "team"},
    "yunikorn": {"yunikorn.apache.org/app-id": "example", "yunikorn.apache.org/queue": "root.team"},
    "kai-scheduler": {"kai.scheduler/queue": "team"},
}
"""Labels with which a job chooses its queue in schedulers of which KubeRay knows the gangs."""


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_jobs_and_pods_with_the_labels_of_a_scheduler_are_accepted(api: httpx.Client, scheduler: str) -> None:
    job = pod_edits.job_with({"spec.scheduling": {"gang": True, "labels": SCHEDULERS[scheduler]}})
    assert job_requests.create(api, job).status == 201
    pods = pod_edits.pods_of(RLJob.from_wire(job).spec)
    assert all(SCHEDULERS[scheduler].items() <= object_at(pod, "metadata", "labels").items() for pod in pods)
    assert rejections(api, pods) == []


@pytest.mark.parametrize("edits", STRICTER, ids=str)
def test_where_rljob_is_stricter_the_pods_would_be_accepted(api: httpx.Client, edits: pod_edits.Edits) -> None:
    assert isinstance(spec_or_reason(edits), str)
    assert job_requests.create(api, pod_edits.job_with(edits)).status == 422
    assert rejections(api, pod_edits.raw_pods_of(edits)) == []


WARNED: list[pod_edits.Edits] = [
    {HEAD + "resources": {"limits": {"memory": "400m"}}},
    {HEAD + "template.nodeSelector": {"failure-domain.beta.kubernetes.io/zone": "a"}},
    {HEAD + "template.nodeSelector": {"failure-domain.beta.kubernetes.io/region": "a"}},
    {HEAD + "template.nodeSelector": {"beta.kubernetes.io/arch": "a"}},
    {HEAD + "template.nodeSelector": {"beta.kubernetes.io/os": "a"}},
    {HEAD + "template.nodeSelector": {"beta.kubernetes.io/instance-type": "a"}},
    {HEAD + "template.annotations": {APPARMOR + "ray": "runtime/default"}},
    {HEAD + "template.annotations": {"scheduler.alpha.kubernetes.io/critical-pod": ""}},
    {HEAD + "template.annotations": {"security.alpha.kubernetes.io/sysctls": ""}},
    {HEAD + "template.annotations": {"security.alpha.kubernetes.io/unsafe-sysctls": ""}},
    {HEAD + "template.affinity": {"podAffinity": {REQUIRED: [{"topologyKey": "a"}]}}},
    {
        HEAD + "template.affinity": {
            "nodeAffinity": {
                REQUIRED: {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "beta.kubernetes.io/os", "operator": "Exists"}]},
                    ]
                }
            }
        }
    },
]


@pytest.mark.parametrize("edits", WARNED, ids=str)
def test_the_validator_warns_where_the_server_warns(api: httpx.Client, edits: pod_edits.Edits) -> None:
    job = RLJob.from_wire(pod_edits.job_with(edits))
    head, _ = pod_edits.pods_of(job.spec)
    answer = api.post(PODS, params={"dryRun": "All"}, json=head)
    assert answer.status_code == 201
    assert "299" in answer.headers.get("warning", "")
    [warning] = job_warnings(job)
    assert warning.path[:2] == ("spec", "head")
