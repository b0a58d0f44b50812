"""Every status that this version's operator can write is read completely, shown and explained."""

from __future__ import annotations

import re
from collections import Counter

from hypothesis import given, settings

from rljob.stored_job import StoredJob, stored_job
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_cli.cluster.explain import explanation
from rljob_cli.cluster.listing import list_lines
from rljob_cli.cluster.status import job_lines
from rljob_operator.reconcile.observed import Observed
from rljob_testing.operator import any_observed, inputs
from rljob_testing.operator.inputs import decide

OF_A_NEWER_OPERATOR = "Nothing blocks the job"
"""Drawn seldom, because this operator does not write such a condition; `test_explain` has it."""
HEADLINES = {
    "The job is being deleted",
    "The job has finished",
    "The job has finished in attempt N",
    "Attempt N has been stopping",
    "A user asked to stop the job; the operator has not applied the request yet",
    "The job is being suspended",
    "The job is suspended",
    "The job is waiting for its next attempt",
    "The job is waiting",
    "The job is waiting (attempt N)",
    "Running",
    "Nothing blocks the job; it waits for its first step",
    OF_A_NEWER_OPERATOR,
    "No operator has processed the job yet",
}


def stored(seen: Observed, status: RLJobStatus) -> StoredJob:
    """The job as Kubernetes returns it, with this status."""
    requests = {ANNOTATION_STOP: seen.job.stop_request, ANNOTATION_RETRY: seen.job.retry_request}
    annotations = {name: value for name, value in requests.items() if value is not None}
    metadata = {"name": seen.job.name, "namespace": "here", "creationTimestamp": inputs.NOW.isoformat()}
    if seen.job.deleting:
        metadata["deletionTimestamp"] = inputs.NOW.isoformat()
    spec = seen.job.spec.to_wire() if seen.job.spec is not None else {}
    whole = {"metadata": metadata | {"annotations": annotations}, "spec": spec, "status": status.to_wire()}
    return stored_job(whole)


def test_every_status_of_a_job_is_shown_and_explained() -> None:
    headlines: Counter[str] = Counter()

    @settings(max_examples=600)
    @given(any_observed.observations())
    def check(seen: Observed) -> None:
        job = stored(seen, decide(seen).status)
        lines = explained(job)
        [heading] = {"\nWhat comes next:", "\nResults:"} & set(lines)
        next_lines = lines[lines.index(heading) + 1 :]
        assert next_lines
        advice = [line for line in lines if line.startswith("What to do: ")]
        assert advice or any(line.startswith(("Running:", "Nothing blocks the job")) for line in lines)
        assert list_lines([job], inputs.NOW, everywhere=True, wide=True)[1].plain.split()[:2] == [
            "here",
            seen.job.name,
        ]
        text = "\n".join(line.plain for line in job_lines(job, inputs.NOW))
        result = job.status.result
        assert ("  result " in text) == (result is not None)
        assert ("  next  " in text) == (job.status.next_attempt is not None)
        assert (job.ending is None) == (result is None)
        before_the_pass = explained(stored(seen, seen.job.status))
        headlines.update([headline(lines), headline(before_the_pass)])

    check()
    assert HEADLINES - set(headlines) <= {OF_A_NEWER_OPERATOR}
    assert [text for text in headlines if sum(text == kind for kind in HEADLINES) != 1] == []


def explained(job: StoredJob) -> list[str]:
    assert job.unparsed_fields == ()
    assert job.status == RLJobStatus.from_wire(job.wire["status"])
    return [line.plain for line in explanation(job, [], [], inputs.NOW)]


def headline(lines: list[str]) -> str:
    """The text without what differs from job to job."""
    text = next(line for line in lines[1:] if line and not line.startswith(" "))
    return re.split(r"[:,.]| for N", re.sub(r"\d+", "N", text))[0].removesuffix(" and the operator has not")
