"""`rljob explain` for jobs that wait for capacity, a queue or their pods: it promises what the operator does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from rljob import cluster as client
from rljob.cluster import PlacedPods
from rljob.stored_job import StoredJob, stored_job
from rljob_api.conditions import Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.v1alpha1.pools import QUEUE_LABEL
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_cli.cluster.explain import explanation
from rljob_operator.reconcile.observed import EffectFailure, EffectKind, Observed, PodProblem, Reachability
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs
from rljob_testing.operator.reasons_of_waiting import evicted, in_queue, refused_creation, without_room

Rljob = Callable[..., tuple[int, str, str]]
R = Reason
DEADLINE_SECONDS = 1800
NEXT = "What comes next:"


def job_of(seen: Observed, status: RLJobStatus, labels: Mapping[str, str] | None = None) -> StoredJob:
    """The job as the API server has it after a pass of the operator."""
    assert seen.job.spec is not None
    metadata = {"name": "example", "namespace": "team", "labels": labels or {}}
    metadata |= {"creationTimestamp": timestamp(inputs.CREATED)}
    return stored_job({"metadata": metadata, "spec": seen.job.spec.to_wire(), "status": status.to_wire()})


def explained(seen: Observed, holders: PlacedPods | None = None, seconds: float = 0) -> list[str]:
    """The lines about the job after a pass of the operator, `seconds` after the time of `inputs`."""
    now = inputs.at(seconds)
    lines = explanation(job_of(seen, inputs.decide(seen, now).status), [], [], now, "", holders)
    return [line for text in lines for line in text.plain.split("\n")]


def what_is_next(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines[lines.index(NEXT) + 1 :]]


def with_problem(reason: Reason) -> Observed:
    pods = (inputs.pod("h", HEAD_GROUP), inputs.pod("w", problem=PodProblem(reason, "why")))
    return inputs.observed(inputs.provisioning(), inputs.cluster(), pods)


def after_training(seen: Observed) -> Observed:
    """The same job, with an earlier attempt whose trainer ran."""
    former = inputs.attempt(
        submissions=1, number=1, record={"ended": timestamp(inputs.CREATED), "cluster": "example-0"}
    )
    status = seen.job.status.model_copy(update={"attempts": (former, *seen.job.status.attempts)})
    return replace(seen, job=replace(seen.job, status=status))


def started_ago(seen: Observed, seconds: float) -> Observed:
    """The same job, whose newest attempt started `seconds` ago."""
    since, attempts = timestamp(inputs.at(-seconds)), seen.job.status.attempts
    update = {"started": since, "active_since": since if attempts[-1].active_since is not None else None}
    status = seen.job.status.model_copy(
        update={
            "attempts": (*attempts[:-1], attempts[-1].model_copy(update=update)),
            "waiting_since": since if seen.job.status.waiting_since is not None else None,
        }
    )
    return replace(seen, job=replace(seen.job, status=status))


def rejected_creation() -> Observed:
    failure = EffectFailure(EffectKind.CREATE_CLUSTER, R.CREATION_REJECTED, "a webhook denied the request")
    return replace(inputs.observed(inputs.provisioning(seen=False)), failure=failure)


def outcome(status: RLJobStatus) -> str:
    """What followed the attempt: the job failed, a retry was used, or a restart that uses none."""
    if status.result is not None:
        return "failed"
    assert status.next_attempt is not None
    assert status.counters is not None
    return "retry" if status.counters.infrastructure_retries else "free"


def promised(line: str) -> str:
    if line.startswith("the job ends as Failed, without a retry"):
        return "failed"
    return "retry" if "uses a retry (Infrastructure), or the job fails if none is left" in line else "free"


@pytest.mark.parametrize("has_trained", [False, True], ids=["new", "trained before"])
@pytest.mark.parametrize(
    "seen",
    [
        *(with_problem(reason) for reason in (R.IMAGE_PULL_FAILED, R.CONTAINER_CRASHING, R.DISRUPTED)),
        inputs.observed(inputs.provisioning(), inputs.cluster(), (inputs.pod("h", HEAD_GROUP),)),
        inputs.observed(inputs.provisioning(), inputs.cluster(), inputs.ready_pods(), inputs.silent_ray()),
        inputs.observed(
            inputs.provisioning(), inputs.cluster(), inputs.ready_pods(), inputs.silent_ray(Reachability.REJECTED)
        ),
        without_room(seconds_ago=60),
        without_room(R.QUOTA_EXCEEDED, 60),
        refused_creation(),
        rejected_creation(),
    ],
)
def test_what_happens_at_the_provisioning_deadline_is_what_the_operator_does(seen: Observed, has_trained: bool) -> None:
    seen = started_ago(after_training(seen) if has_trained else seen, DEADLINE_SECONDS - 600)
    (line,) = [line for line in what_is_next(explained(seen)) if "2026-03-01T12:10:00Z (in 10m)" in line]
    after = inputs.decide(started_ago(seen, DEADLINE_SECONDS)).status
    assert promised(line) == outcome(after), line


def test_the_deadline_counts_from_when_all_pods_had_nodes() -> None:
    seen = inputs.observed(inputs.provisioning(), inputs.cluster(), (inputs.pod("h", HEAD_GROUP),))
    attempt = {"active_since": timestamp(inputs.at(-3000)), "scheduled_at": timestamp(inputs.at(-600))}
    status = inputs.provisioning(record=attempt)
    (line,) = [
        line for line in what_is_next(explained(inputs.observed(status, seen.clusters[0]))) if "12:20:00Z" in line
    ]
    assert line == Mentions("attempt 1 has not started by 2026-03-01T12:20:00Z (in 20m)")


@pytest.mark.parametrize(
    ("seconds_ago", "is_failed"), [(59, False), (60, True)], ids=["a minute is not over", "a minute is over"]
)
def test_a_name_that_is_taken_ends_the_job_after_a_minute(seconds_ago: float, is_failed: bool) -> None:
    record = {"name_taken_since": timestamp(inputs.at(-seconds_ago))}
    failure = EffectFailure(EffectKind.CREATE_CLUSTER, R.NAME_CONFLICT, "it belongs to another")
    seen = replace(inputs.observed(inputs.provisioning(seen=False, record=record)), failure=failure)
    lines = what_is_next(explained(seen))
    promise = Mentions("ends as Failed, without a retry", "a minute after it was first seen", without=["12:29:00Z"])
    assert (promise in lines) is not is_failed
    assert (inputs.decide(seen).status.result is not None) is is_failed


def with_active_deadline(seen: Observed, seconds: int = 600) -> Observed:
    spec = inputs.spec({"runPolicy.activeDeadlineSeconds": seconds})
    return replace(seen, job=replace(seen.job, spec=spec))


@pytest.mark.parametrize(
    ("seen", "until"),
    [
        (in_queue(), "until the queue admits the job"),
        (without_room(seconds_ago=1000), "while the job waits for quota or free capacity"),
        (without_room(R.QUOTA_EXCEEDED, 1000), "while the job waits for quota of a ResourceQuota"),
    ],
    ids=["queue", "no node", "quota"],
)
def test_no_active_deadline_passes_while_a_job_waits_for_capacity(seen: Observed, until: str) -> None:
    seen = with_active_deadline(seen)
    lines = what_is_next(explained(seen))
    assert Mentions("10m of runPolicy.activeDeadlineSeconds are left", f"the deadline is paused {until}") in lines
    assert not any("has not finished" in line for line in lines)
    written = inputs.with_status_written(seen, inputs.decide(seen))
    assert inputs.decide(written, inputs.at(300)).status.attempts[-1].stop is None


@pytest.mark.parametrize(
    ("message", "is_explained"), [("", True), ("2 more needed", False)], ids=["no message", "a message"]
)
def test_a_queue_that_gives_no_reason_is_explained(message: str, is_explained: bool) -> None:
    text = "\n".join(explained(in_queue(message=message)))
    assert text == Mentions("waits in queue team (Kueue)", "It has waited for quota of its queue since")
    silence = Mentions("several equal jobs", "only for the first", "not installed", "ray.io/raycluster", "-n team")
    assert (text == silence) is is_explained
    # Jobs of other namespaces use this quota, too.
    assert "hold GPUs" not in text


def test_what_holds_gpus_is_listed_also_if_it_waits_itself() -> None:
    holders = PlacedPods({"half": 2, "example": 1, "kept": 1}, is_complete=True)
    text = "\n".join(explained(without_room(seconds_ago=60), holders))
    assert text == Mentions(
        "It has waited for quota or free capacity since", "worker pods on nodes): half (2), kept (1)."
    )
    assert "worker pods on nodes): none." in "\n".join(explained(without_room(), PlacedPods({"example": 1}, True)))
    many = PlacedPods({f"job-{number}": 1 for number in range(12)}, is_complete=False)
    assert "job-9 (1), ...." in "\n".join(explained(without_room(seconds_ago=60), many))
    assert "hold GPUs" not in "\n".join(explained(without_room(seconds_ago=60)))


def test_an_evicted_job_waits_in_its_queue_again() -> None:
    seen = evicted()
    stopping = inputs.with_status_written(seen, inputs.decide(seen))
    gone = replace(stopping, pods=(inputs.pod("w", deleting=True),))
    lines = explained(gone)
    assert any("It has waited for quota of its queue since" in line for line in lines)
    assert what_is_next(lines)[0] == Mentions(
        "attempt 2 starts when the pods of attempt 1 are deleted", "waits in the queue"
    )
    retry = next(line for line in lines if "`rljob retry" in line)
    assert retry == Mentions("resets the retry budgets", without=["now", "pause"])


def finished(more: Mapping[str, object], labels: Mapping[str, str] | None = None) -> list[str]:
    seen = inputs.healthy(job_spec=inputs.spec({f"runPolicy.{name}": value for name, value in more.items()}))
    result = {"outcome": "Failed", "reason": "OutOfMemory", "at": timestamp(inputs.at(-60))}
    status = inputs.running(record={"ended": timestamp(inputs.at(-60))}).to_wire() | {"result": result}
    seen = replace(seen, job=replace(seen.job, status=RLJobStatus.from_wire(status), labels=labels or {}))
    job = job_of(seen, inputs.decide(seen).status, labels)
    return [line.plain for line in explanation(job, [], [], inputs.NOW)]


@pytest.mark.parametrize(
    ("more", "labels", "expected"),
    [
        ({}, {}, Mentions("is kept until 2026-03-02T11:59:00Z", "runPolicy.keepClusterSeconds", "holds its GPUs")),
        ({"keepClusterSeconds": 600}, {}, Mentions("kept until 2026-03-01T12:09:00Z (in 9m;")),
        ({"ttlSecondsAfterFinished": 300}, {}, Mentions("until 2026-03-01T12:04:00Z", "ttlSecondsAfterFinished")),
        ({}, {QUEUE_LABEL: "team"}, Mentions("not kept", "quota of its queue", without=["holds its GPUs"])),
        ({"keepClusterSeconds": 30}, {}, Mentions("being deleted", without=["kept", "holds"])),
    ],
    ids=["by default", "a time", "deleted with the job", "in a queue", "the time is over"],
)
def test_how_long_a_cluster_is_kept_is_said(
    more: Mapping[str, object], labels: Mapping[str, str], expected: Mentions
) -> None:
    lines = finished({"cleanup": "KeepCluster", **more}, labels)
    assert expected in [line for line in lines if re.search("RayCluster|cluster is not", line)]


def test_a_job_that_never_had_a_cluster_keeps_none() -> None:
    seen = inputs.observed(job_spec=inputs.spec({"checkpoint": {}, "runPolicy.cleanup": "KeepCluster"}))
    assert not any("RayCluster" in line for line in explained(seen))


@pytest.mark.apiserver
def test_the_holders_of_gpus_are_read_from_the_server(
    job_cluster: JobCluster, rljob: Rljob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_cluster.create_small_job()
    since = "2026-01-31T12:00:00Z"
    waits = job_statuses.condition("ClusterReady", "False", "Unschedulable", since)
    attempt = {"number": 1, "cluster": "small-1", "started": since}
    job_cluster.write_status("small", {"attempts": [attempt], "conditions": [waits], "waitingSince": since})
    running, ended = {"phase": "Running"}, {"phase": "Succeeded"}
    for name, job, status in (
        ("a", "half", running),
        ("b", "half", running),
        ("c", "half", ended),
        ("d", "small", running),
    ):
        labels = {"rljob.dev/job": job, "rljob.dev/job-uid": job, "rljob.dev/pool": "main"}
        job_cluster.create_pod(name, labels, ["ray"], status)
    job_cluster.create_pod("head", {"rljob.dev/job": "heads", "rljob.dev/job-uid": "u"}, ["ray"], running)
    job_cluster.create_pod("pending", labels | {"rljob.dev/job": "pending"}, ["ray"], {}, node="")
    code, text, errors = rljob("explain", "small")
    assert (code, errors) == (0, "")
    assert "Other jobs of this namespace that hold GPUs (worker pods on nodes): half (2).\n" in text
    monkeypatch.setattr(client, "_PAGE_SIZE", 1)
    assert "hold GPUs (worker pods on nodes): half (2).\n" in rljob("explain", "small")[1]
    monkeypatch.setattr(client, "_MAX_PAGES", 1)
    assert "hold GPUs (worker pods on nodes): half (1), ....\n" in rljob("explain", "small")[1]
    queued = job_statuses.condition("ClusterReady", "False", "Queued", since)
    job_cluster.write_status("small", {"conditions": [queued]})
    assert "hold GPUs" not in rljob("explain", "small")[1]
