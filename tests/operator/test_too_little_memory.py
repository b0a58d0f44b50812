"""A job whose models are estimated to be too large for its GPUs: it gets one warning, and nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rljob_api.conditions import Reason
from rljob_operator.kube import observed_objects
from rljob_operator.kube.observed_objects import JobReader
from rljob_operator.reconcile.decision import EventRecord, EventType
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs
from rljob_testing.operator.testbed import cluster_job

Json = dict[str, object]
METADATA = {"name": "job", "namespace": "team", "uid": "u1", "creationTimestamp": "2026-01-31T12:00:00Z"}


def job(edits: Mapping[str, object] | None = None, **parts: object) -> Json:
    """A job as the API server returns it."""
    return {**cluster_job("job", edits), "metadata": METADATA, **parts}


def test_the_memory_of_a_spec_is_estimated_once() -> None:
    reader = JobReader()
    too_large = {
        "spec.training.model.source": "Qwen/Qwen3-32B",
        "spec.pools[0].template.nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
    }
    first = reader.read(job(too_large)).observed.memory_shortage
    assert first == Mentions("pool main (L4)", "too small")
    assert reader.read(job(too_large, status={"observedGeneration": 1})).observed.memory_shortage is first
    assert reader.read(job()).observed.memory_shortage == ""
    assert reader.read(job({**too_large, "spec.training.steps": -1})).observed.memory_shortage == ""


def test_equal_jobs_share_an_estimate_and_the_number_of_kept_estimates_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    estimates: list[object] = []

    def estimate(spec: object) -> str:
        estimates.append(spec)
        return "too small"

    monkeypatch.setattr(observed_objects, "memory_shortage", estimate)
    monkeypatch.setattr(observed_objects, "MAX_MEMORY_WARNINGS", 2)
    reader = JobReader()

    def read(name: str, edits: Mapping[str, object]) -> int:
        """Reads a new job; returns how many estimates there have been so far."""
        assert reader.read(job(edits, metadata={**METADATA, "name": name})).observed.memory_shortage == "too small"
        return len(estimates)

    assert read("first", {}) == 1
    assert read("other-policy", {"spec.runPolicy.maxAppRetries": 7, "spec.suspend": True}) == 1
    assert read("more-steps", {"spec.training.steps": 77}) == 2
    assert read("again", {}) == 2
    assert read("larger-pool", {"spec.pools[0].nodes": 2}) == 3
    assert read("still-known", {}) == 3
    assert read("forgotten", {"spec.training.steps": 77}) == 4


def test_a_failed_estimate_does_not_stop_a_job_from_being_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mistake(_spec: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(observed_objects, "memory_shortage", mistake)
    assert JobReader().read(job()).observed.spec is not None
    assert "the memory of a job could not be estimated" in caplog.text


def test_too_little_memory_is_one_warning_and_blocks_nothing() -> None:
    seen = inputs.observed()
    too_large = replace(seen, job=replace(seen.job, memory_shortage="later wake-ups takes 91.0 of 78.4 GiB"))
    decision = inputs.decide(too_large)
    warning = EventRecord(EventType.WARNING, Reason.MEMORY_TOO_SMALL, "later wake-ups takes 91.0 of 78.4 GiB")
    assert decision.events == (warning, *inputs.decide(seen).events)
    assert decision.effects == inputs.decide(seen).effects
    again = inputs.decide(replace(too_large, job=replace(too_large.job, status=decision.status)))
    assert warning not in again.events
