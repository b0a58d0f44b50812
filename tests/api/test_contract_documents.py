"""Documents between programs: nothing is lost, unset fields are left out, other versions are rejected."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from rljob_api.constants import CONTRACT_VERSION, MAX_SPEC_BYTES
from rljob_api.contract_documents import TrainerJob, dump_job, dump_run_state, load_job, load_run_state
from rljob_api.errors import DocumentError
from rljob_api.run_state import RunPhase, RunState
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_api.v1alpha1.status import Progress
from rljob_testing.jobs.valid_job import REMOVED, valid_job

NOW = "2026-01-31T12:00:00Z"


def trainer_job(edits: dict[str, object] | None = None) -> TrainerJob:
    return TrainerJob(name="example", spec=RLJob.from_wire(valid_job(edits or {})).spec)


def run_state() -> RunState:
    progress = Progress(step=3, total_steps=10, updated_at=NOW)
    return RunState(job_name="example", attempt=1, phase=RunPhase.RUNNING, progress=progress, written_at=NOW)


def test_a_job_survives_a_round_trip() -> None:
    off = {"dualClipRatio": 0}
    job = trainer_job({"spec.training.algorithm.loss.clipped": off, "spec.training.model.source": "ö/模型"})
    read = load_job(dump_job(job))
    assert read == job
    assert resolve_algorithm(read.spec.training.algorithm) == resolve_algorithm(job.spec.training.algorithm)


def test_default_values_are_left_out_but_the_version_is_written() -> None:
    written = json.loads(dump_job(trainer_job()))
    spec = valid_job({"spec.pools[0].nodes": REMOVED})["spec"]
    assert written == {"contractVersion": CONTRACT_VERSION, "name": "example", "spec": spec}


def test_a_job_may_have_64_kibibytes_and_no_more() -> None:
    def filled(length: int) -> TrainerJob:
        gym = {"type": "ReasoningGym", "reasoningGym": {"task": "t", "config": {"filler": "x" * length}}}
        return trainer_job({"spec.training.dataset": gym})

    room = MAX_SPEC_BYTES - len(dump_job(filled(0)))
    assert len(dump_job(filled(room))) == 65536
    with pytest.raises(DocumentError, match=r"job example: .*at most 65536 bytes .*65537.* shorten reasoningGym"):
        dump_job(filled(room + 1))


@pytest.mark.parametrize("version", [0, 3, 1.0, "1", True, None])
def test_an_unreadable_version_is_rejected(version: object) -> None:
    text = json.dumps(json.loads(dump_job(trainer_job())) | {"contractVersion": version})
    with pytest.raises(DocumentError) as caught:
        load_job(text)
    assert f"contract versions 1 to 2 (seen: {json.dumps(version)}); " in str(caught.value)
    assert "contract versions differ by at most one" in str(caught.value)


def test_a_document_without_a_version_is_rejected() -> None:
    with pytest.raises(DocumentError, match=r"contract versions 1 to 2 \(seen: null\)"):
        load_job('{"name": "example"}')


def test_a_damaged_document_is_rejected_with_path_and_value() -> None:
    with pytest.raises(DocumentError, match="job: must be JSON"):
        load_job(dump_job(trainer_job())[:-1])
    with pytest.raises(DocumentError, match=r"run state: must be a JSON object \(seen: list\)"):
        load_run_state("[]")
    with pytest.raises(DocumentError, match="job: spec: is required"):
        load_job('{"contractVersion": 1, "name": "example"}')
    damaged = json.loads(dump_run_state(run_state())) | {"attempt": "one"}
    with pytest.raises(DocumentError, match=r'run state: attempt: must be a whole number \(seen: "one"\)'):
        load_run_state(json.dumps(damaged))


@pytest.mark.parametrize("load", [load_job, load_run_state])
def test_a_document_that_is_nested_too_deep_is_damaged(load: Callable[[str], object]) -> None:
    for depth in (900, 50_000):
        with pytest.raises(DocumentError) as caught:
            load('{"contractVersion":1,"extra":' + "[" * depth + "]" * depth + "}")
    assert "too many nested levels" in str(caught.value)


def test_the_run_state_survives_a_round_trip() -> None:
    assert load_run_state(dump_run_state(run_state())) == run_state()


def test_the_full_wire_form_writes_defaults_and_no_nulls() -> None:
    volume = {"name": "scratch", "mountPath": "/scratch", "type": "EmptyDir", "emptyDir": {}}
    job = RLJob.from_wire(valid_job({"spec.volumes": [volume]}))
    wire = job.to_full_wire()
    assert RLJob.from_wire(wire) == job
    assert "status" not in wire
    spec = RLJob.from_wire(wire).spec.to_full_wire()
    assert "image" not in spec
    assert spec["volumes"] == [volume | {"emptyDir": {}, "readOnly": False}]
    assert spec["training"]["seed"] == 0  # type: ignore[index]
