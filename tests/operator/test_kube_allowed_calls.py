"""Objects and responses of the API server, as the operator reads and writes them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, merge_patch, without_nulls
from rljob_operator.kube.errors import (
    AlreadyExistsError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    InvalidFieldError,
    KubeError,
    NotFoundError,
    RefusedError,
    ResourceTypeMissingError,
    UnavailableError,
    UnknownFieldError,
    error_of,
)
from rljob_operator.kube.observed_objects import JobObject, JobReader, controller_uid, observed_cluster
from rljob_operator.kube.projections import projected
from rljob_testing.jobs.valid_job import edited
from rljob_testing.operator import api_proxy
from rljob_testing.operator.testbed import cluster_job

Json = dict[str, object]
TIME = "2026-01-31T12:00:00Z"
STATUS: Json = {
    "observedGeneration": 1,
    "phase": "Running",
    "conditions": [
        {
            "type": "SpecValid",
            "status": "True",
            "reason": "Valid",
            "message": "",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-31T12:00:00Z",
        }
    ],
    "attempts": [{"number": 1, "cluster": "job-1", "submissions": 1, "started": "2026-01-31T12:00:00Z"}],
}


def job(**parts: object) -> Json:
    """A job as the API server returns it."""
    metadata = {
        "name": "job",
        "namespace": "team",
        "uid": "u1",
        "generation": 3,
        "resourceVersion": "77",
        "creationTimestamp": "2026-01-31T12:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
    }
    return {**cluster_job("job"), "metadata": metadata, **parts}


def job_object(raw: Json) -> JobObject:
    return JobReader().read(raw)


def test_a_spec_is_checked_again_only_after_a_change() -> None:
    reader = JobReader()
    first = reader.read(job()).observed.spec
    assert reader.read(job(status=STATUS)).observed.spec is first
    changed = reader.read(edited(job(), {"spec.training.steps": 9})).observed.spec
    assert changed is not None
    assert changed.training.steps == 9
    assert reader.read(edited(job(), {"spec.training.steps": -1})).observed.spec is None
    reader.forget("team", "job")
    assert reader.read(job()).observed.spec is not first


def test_a_job_is_read() -> None:
    read = job_object(job(status=STATUS))
    seen = read.observed
    assert (seen.namespace, seen.name, seen.uid, seen.generation) == ("team", "job", "u1", 3)
    assert seen.created == datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
    assert (seen.deleting, seen.spec_error, read.resource_version) == (False, None, "77")
    assert seen.spec is not None
    assert seen.spec.pools[0].gpus_per_node == 2
    assert seen.status.attempts[0].submissions == 1


def test_a_job_without_status_that_is_being_deleted_is_read() -> None:
    raw = job()
    metadata = raw["metadata"]
    assert isinstance(metadata, dict)
    metadata["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    seen = job_object(raw).observed
    assert seen.deleting
    assert seen.status.conditions == ()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.training.steps", -1, "spec.training.steps: must be at least 0 (seen: -1)"),
        ("spec.pools[0].gpusPerNode", 5, "(seen:"),
    ],
)
def test_an_unreadable_spec_is_reported_with_its_cause(path: str, value: object, message: str) -> None:
    raw = edited(job(status=STATUS), {path: value})
    seen = job_object(raw).observed
    assert seen.spec is None
    assert seen.spec_error is not None
    assert message in seen.spec_error
    assert seen.status.attempts[0].cluster == "job-1"


@pytest.mark.parametrize(
    ("policy", "read"),
    [
        ({"stallDeadlineSeconds": 60, "patience": 1}, RunPolicy(stall_deadline_seconds=60)),
        (
            {"activeDeadlineSeconds": 90, "cleanup": "KeepPods", "elastic": {"minNodes": "half"}},
            RunPolicy(active_deadline_seconds=90),
        ),
        ("none", RunPolicy()),
    ],
)
def test_deadlines_of_an_unreadable_spec_are_read(policy: object, read: RunPolicy) -> None:
    raw = edited(job(status=STATUS), {"spec.pools[0].gpusPerNode": 5, "spec.runPolicy": policy})
    seen = job_object(raw).observed
    assert (seen.spec, seen.readable_policy) == (None, read)


def test_fields_of_a_newer_definition_are_ignored_and_named() -> None:
    """The API server fills in defaults, so every new job has these fields."""
    newer = {
        "spec.queue": {"name": "a"},
        "spec.runPolicy.patience": {"minNodes": 1},
        "spec.pools[0].topology": "Rack",
        "spec.training.algorithm.entropyBonus": 0.1,
    }
    raw = edited(job(status=STATUS), newer)
    before = copy.deepcopy(raw)
    seen = job_object(raw).observed
    assert seen.spec_error is None
    assert seen.spec is not None
    assert seen.spec == job_object(job()).observed.spec
    assert set(seen.unknown_fields) == set(newer)
    assert raw == before
    assert job_object(job()).observed.unknown_fields == ()


def test_only_readable_specs_are_checked_by_the_rules() -> None:
    raw = edited(job(status=STATUS), {"spec.queue": {"name": "a"}, "spec.pools[0].gpusPerNode": 5})
    seen = job_object(raw).observed
    assert seen.spec is None
    assert seen.spec_error is not None
    assert "spec.queue" not in seen.spec_error
    assert "(seen:" in seen.spec_error


def test_requests_by_annotation_are_read() -> None:
    raw = job()
    metadata = raw["metadata"]
    assert isinstance(metadata, dict)
    assert (job_object(raw).observed.stop_request, job_object(raw).observed.retry_request) == (None, None)
    metadata["annotations"] = {"rljob.dev/stop-requested-at": "s", "rljob.dev/retry-requested-at": "r"}
    assert (job_object(raw).observed.stop_request, job_object(raw).observed.retry_request) == ("s", "r")


def test_fields_of_a_newer_status_are_kept() -> None:
    newer = copy.deepcopy(STATUS)
    newer["estimate"] = {"cost": 3}
    conditions = newer["conditions"]
    assert isinstance(conditions, list)
    conditions[0]["severity"] = "Info"
    read = job_object(job(status=newer)).observed.status
    assert read == job_object(job(status=STATUS)).observed.status
    assert read.to_wire() == STATUS, "a patch is computed against this, so that it changes nothing else"
    assert newer["estimate"] == {"cost": 3}


def test_unknown_values_of_a_newer_status_are_read() -> None:
    """Unknown names of states, outcomes and reasons hide no job."""
    newer: Json = copy.deepcopy(STATUS) | {"counters": {"attempts": 70}, "phase": "Dreaming"}
    attempts = [
        {
            "number": number,
            "cluster": f"job-{number}",
            "started": "2026-01-31T12:00:00Z",
            "state": "Dreaming",
            "outcome": "Vanished",
            "reason": "MeteorStrike",
            "failureClass": "Cosmic",
        }
        for number in range(1, 71)
    ]
    newer["attempts"] = attempts
    newer["progress"] = {"step": -4, "totalSteps": "many", "updatedAt": "then"}
    read = job_object(job(status=newer))
    assert read.observed.status.attempts[-1].outcome == "Vanished"
    assert [attempt.number for attempt in read.observed.status.attempts] == list(range(7, 71)), "the newest 64"
    assert read.observed.status.progress is None, "unreadable fields that are only for people are written again"


def test_a_damaged_status_is_not_taken_for_an_empty_one() -> None:
    with pytest.raises(KubeError, match=r"RLJob team/job: status\.attempts"):
        job_object(job(status={"attempts": [{"number": "one"}]}))


@pytest.mark.parametrize(
    "fields",
    [
        {"counters": {"attempts": 1}},
        {"nextAttempt": {"reason": "r", "failureClass": "Resumable", "notBefore": TIME, "sameCluster": True}},
    ],
)
def test_a_status_that_has_lost_its_attempts_is_damaged(fields: Json) -> None:
    with pytest.raises(KubeError, match=r"^RLJob team/job: status\.attempts is empty.*\(seen: 1\); delete the job"):
        job_object(job(status=fields | {"attempts": []}))


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "9999-12-31T23:59:59-12:00"])
def test_a_status_with_times_at_the_ends_of_the_calendar_is_damaged(time: str) -> None:
    message = "RLJob team/job: status.attempts[0].activeSince must be a time in the years 1970 to 2999"
    with pytest.raises(KubeError, match=re.escape(message)):
        job_object(edited(job(status=STATUS), {"status.attempts[0].activeSince": time}))


def test_a_creation_time_before_the_calendar_begins_is_none() -> None:
    raw = edited(job(), {"metadata.creationTimestamp": "0001-01-01T00:00:00+12:00"})
    assert job_object(raw).observed.created == datetime(1970, 1, 1, tzinfo=UTC)


def test_a_cluster_is_read() -> None:
    raw = {
        "metadata": {
            "name": "job-1",
            "uid": "c1",
            "ownerReferences": [{"uid": "other"}, {"uid": "u1", "controller": True}],
        },
        "status": {
            "conditions": [
                {"type": "HeadPodReady", "status": "False", "reason": "HeadPodNotFound"},
                {
                    "type": "ReplicaFailure",
                    "status": "True",
                    "reason": "FailedCreateHeadPod",
                    "message": "FailedCreateHeadPod\nexceeded quota",
                },
            ]
        },
    }
    seen = observed_cluster(raw)
    assert observed_cluster(projected(CLUSTERS, raw)) == seen
    assert controller_uid(projected(CLUSTERS, raw)) == "u1"
    assert (seen.name, seen.uid, seen.deleting, seen.asks_for_token) == ("job-1", "c1", False, False)
    assert controller_uid(raw) == "u1"
    assert seen.pod_creation_error == "FailedCreateHeadPod: exceeded quota"
    assert controller_uid({"metadata": {"name": "x", "uid": "y"}}) is None


def test_a_cluster_that_kuberay_rejects_is_read() -> None:
    events = [
        {"reason": "InvalidRayClusterSpec", "message": "old", "lastTimestamp": "2026-01-31T12:00:00Z"},
        {"reason": "InvalidRayClusterSpec", "message": "new", "lastTimestamp": "2026-01-31T12:00:05Z"},
        {"reason": "CreatedHeadPod", "message": "fine", "lastTimestamp": "2026-01-31T12:00:09Z"},
    ]
    assert observed_cluster({"metadata": {"name": "x"}}, events=events).pod_creation_error == "new"
    assert observed_cluster({"metadata": {"name": "x"}}, events=events[2:]).pod_creation_error is None


NAMED = {"name": "job"}


@pytest.mark.parametrize(
    ("status", "body", "text", "kind"),
    [
        (404, {"reason": "NotFound", "details": NAMED, "message": "m"}, "", NotFoundError),
        (404, {"reason": "NotFound", "details": {}, "message": "m"}, "", ResourceTypeMissingError),
        (404, {}, "404 page not found", ResourceTypeMissingError),
        (409, {"reason": "AlreadyExists", "details": NAMED}, "", AlreadyExistsError),
        (409, {"reason": "Conflict", "details": NAMED}, "", ConflictError),
        (403, {"reason": "Forbidden", "message": "exceeded quota"}, "", RefusedError),
        (422, {"reason": "Invalid", "message": "denied by a policy"}, "", RefusedError),
        (422, {"message": "no", "details": {"causes": [{"field": "spec.rayVersion"}]}}, "", InvalidFieldError),
        (400, {"message": "no", "details": {"causes": [{"field": "spec.rayVersion"}]}}, "", RefusedError),
        (400, {"reason": "BadRequest", "message": "no"}, "", RefusedError),
        (401, {"reason": "Unauthorized"}, "", UnavailableError),
        (429, {"reason": "TooManyRequests"}, "", UnavailableError),
        (500, {}, "boom", UnavailableError),
        (500, {"message": "etcdserver: request is too large"}, "", RefusedError),
        (413, {}, "Request entity too large", RefusedError),
        (504, {"reason": "Timeout"}, "", UnavailableError),
    ],
)
def test_responses_map_to_error_types(
    status: int, body: Mapping[str, object], text: str, kind: type[KubeError]
) -> None:
    assert type(error_of("get rljobs /x", status, body, text, "")) is kind


def test_a_rejection_is_only_the_message_of_the_server() -> None:
    error = error_of("create rayclusters /x", 403, {"message": "exceeded quota: gpus"}, "", "")
    assert str(error) == "exceeded quota: gpus"


@pytest.mark.parametrize(
    ("status", "words", "is_read", "kind"),
    [
        (403, "pods is forbidden", True, ForbiddenError),
        (403, "exceeded quota", False, RefusedError),
        (400, 'strict decoding error: unknown field "spec.authOptions"', False, UnknownFieldError),
        (410, "the provided continue parameter is too old", True, ExpiredError),
    ],
)
def test_the_error_type_depends_on_the_request(status: int, words: str, is_read: bool, kind: type[KubeError]) -> None:
    assert type(error_of("x", status, {"message": words}, "", "", is_read)) is kind


def test_the_retry_delay_of_the_server_is_read() -> None:
    def seconds(body: Mapping[str, object], header: str) -> float:
        error = error_of("x", 429, body, "", header)
        assert isinstance(error, UnavailableError)
        return error.retry_after_seconds

    assert seconds({}, "7") == 7.0
    assert seconds({"details": {"retryAfterSeconds": 3}}, "") == 3.0
    assert seconds({}, "Wed, 21 Oct 2026 07:28:00 GMT") == 0.0


def applied(old: Mapping[str, object], patch: Mapping[str, object]) -> Json:
    """Applies a patch as RFC 7386 defines."""
    result = dict(old)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            before = result.get(name)
            result[name] = applied(before if isinstance(before, Mapping) else {}, value)
        else:
            result[name] = value
    return result


VALUES = st.recursive(
    st.integers(0, 2) | st.booleans() | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(OBJECTS, OBJECTS)
def test_a_patch_turns_one_object_into_another(old: Json, new: Json) -> None:
    patch = merge_patch(old, new)
    assert applied(old, patch) == new
    assert (patch == {}) == (old == new)


def test_a_patch_holds_only_changed_fields() -> None:
    old = {"a": 1, "b": {"c": 1, "d": 2}, "e": [1], "f": "gone"}
    new = {"a": 1, "b": {"c": 1, "d": 3}, "e": [1, 2], "f": None, "g": {"h": 1}}
    assert merge_patch(old, new) == {"b": {"d": 3}, "e": [1, 2], "f": None, "g": {"h": 1}}


def test_nulls_are_removed_at_any_depth() -> None:
    assert without_nulls({"a": None, "b": [{"c": None, "d": 1}], "e": ({"f": None},)}) == {"b": [{"d": 1}], "e": [{}]}


def test_paths_are_those_of_the_api() -> None:
    assert JOBS.path("team", "job") == "/apis/rljob.dev/v1alpha1/namespaces/team/rljobs/job"
    assert CLUSTERS.path(None) == "/apis/ray.io/v1/rayclusters"
    assert PODS.path("team") == "/api/v1/namespaces/team/pods"


@pytest.mark.parametrize(
    ("method", "path", "seen"),
    [
        ("GET", "/apis/rljob.dev/v1alpha1/rljobs?limit=5", ("list", "rljob.dev", "rljobs", "")),
        ("GET", "/api/v1/namespaces/a/pods?watch=true", ("watch", "", "pods", "")),
        (
            "PATCH",
            "/apis/rljob.dev/v1alpha1/namespaces/a/rljobs/j/status",
            ("patch", "rljob.dev", "rljobs/status", "j"),
        ),
        ("DELETE", "/apis/ray.io/v1/namespaces/a/rayclusters/j-1", ("delete", "ray.io", "rayclusters", "j-1")),
    ],
)
def test_the_test_proxy_parses_requests(method: str, path: str, seen: tuple[str, str, str, str]) -> None:
    assert api_proxy.seen_request(method, path) == api_proxy.SeenRequest(*seen)
    assert api_proxy.seen_request("GET", "/apis/ray.io/v1") is None
