"""What a program of one version reads of documents by another version. `golden` holds documents as contract version 1
writes them, with nearly every field set. Documents of later versions are made from them: with unknown fields at every
depth, and the next version number."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from rljob_api.constants import CONTRACT_VERSION
from rljob_api.contract_documents import TrainerJob, dump_job, dump_run_state, load_job, load_run_state
from rljob_api.errors import DocumentError
from rljob_api.run_state import RunPhase
from rljob_api.tolerant_reading import (
    AS_FAR_AS_READABLE,
    CHECKPOINT,
    RUN_STATE,
    STATUS,
    STORED_SPEC,
    TRAINER_JOB,
    Policy,
    Reading,
    read_document,
)
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_api.yaml_text import wire_path
from rljob_testing.jobs.valid_job import REMOVED, edited, valid_job
from rljob_testing.messages import Mentions
from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError
from rljob_trainer.checkpoints.layout import digest_of, read_manifest
from rljob_trainer.controller.checkpointing import state_of

GOLDEN = Path(__file__).parent / "golden"
Json = dict[str, object]
NOON = "2026-01-31T12:00:00Z"
NEXT = {"contractVersion": CONTRACT_VERSION + 1}
AFTER_NEXT = {"contractVersion": CONTRACT_VERSION + 2}


def golden(name: str) -> Json:
    document = json.loads((GOLDEN / f"{name}.json").read_text())
    assert isinstance(document, dict)
    return document


def test_unknown_fields_are_left_out_at_any_depth_and_named() -> None:
    wire = valid_job(
        {
            "foo": 1,
            "spec.training.bar": {"baz": None},
            "spec.training.model.tied": [1],
            "spec.training.dataset.x": None,
        },
    )
    wire["spec"]["pools"][0]["spot"] = True  # type: ignore[index]
    before = copy.deepcopy(wire)
    reading = read_document(RLJob, wire, STORED_SPEC)
    assert reading.value == RLJob.from_wire(valid_job())
    assert set(reading.unknown_fields) == {
        "foo",
        "spec.pools[0].spot",
        "spec.training.bar",
        "spec.training.dataset.x",
        "spec.training.model.tied",
    }
    assert wire == before


@pytest.mark.parametrize("policy", [TRAINER_JOB, RUN_STATE, CHECKPOINT, STORED_SPEC, STATUS, AS_FAR_AS_READABLE])
def test_known_fields_are_read_under_every_policy(policy: Policy) -> None:
    assert read_document(RLJob, valid_job(), policy) == Reading(RLJob.from_wire(valid_job()), (), ())
    status = golden("status")
    assert read_document(RLJobStatus, status, policy) == Reading(RLJobStatus.from_wire(status), (), ())


@pytest.mark.parametrize("policy", [TRAINER_JOB, RUN_STATE, CHECKPOINT, STORED_SPEC, STATUS])
def test_known_fields_are_validated_strictly(policy: Policy) -> None:
    with pytest.raises(ValidationError) as caught:
        read_document(RLJob, valid_job({"foo": None, "spec.training.seed": "zero"}), policy)
    assert [error["loc"] for error in caught.value.errors()] == [("spec", "training", "seed")]


def test_only_empty_unknown_fields_are_ignored_where_others_would_matter() -> None:
    empty: Json = {"spec.a": None, "spec.training.b": {}, "spec.training.c": [], "spec.training.model.d": ""}
    reading = read_document(RLJob, valid_job(empty), TRAINER_JOB)
    assert reading.value == RLJob.from_wire(valid_job())
    assert set(reading.unknown_fields) == set(empty)
    for value in (0, False, {"x": None}, "text"):
        with pytest.raises(ValidationError) as caught:
            read_document(RLJob, valid_job(empty | {"spec.e": value}), TRAINER_JOB)
        assert [error["loc"] for error in caught.value.errors()] == [("spec", "e")]


def test_the_status_of_version_1_is_read() -> None:
    assert RLJobStatus.from_wire(golden("status")).to_wire() == golden("status")


def test_the_operator_reads_the_known_fields_of_a_newer_status() -> None:
    """Fields for people may be unreadable; fields for decisions may not be."""
    additions: Json = {"mood": 1, "attempts[0].zone": {"a": 1}, "phase": "Dreaming", "attempts[1].state": "Dreaming"}
    unreadable: Json = {"progress.step": "many", "conditions[0].status": "Perhaps", "pods": {"image": 1}}
    reading = read_document(RLJobStatus, edited(golden("status"), additions | unreadable), STATUS)
    known = edited(golden("status"), {"phase": "Dreaming", "attempts[1].state": "Dreaming"})
    del known["progress"], known["conditions"]
    known.pop("pods", None)
    assert reading.value == RLJobStatus.from_wire(known)
    assert set(reading.unknown_fields) == {"mood", "attempts[0].zone"}
    assert {each["loc"][0] for each in reading.unreadable_parts} == {"progress", "conditions", "pods"}
    with pytest.raises(ValidationError):
        read_document(RLJobStatus, edited(golden("status"), {"counters.attempts": "two"}), STATUS)


def test_a_document_for_display_drops_only_the_unreadable_parts() -> None:
    attempts = [{"number": number, "cluster": f"c{number}", "started": NOON} for number in range(1, 81)]
    wire = edited(
        golden("status"),
        {
            "mood": 1,
            "attempts": attempts,
            "counters.attempts": "many",
            "pools[0].ready": "all",
            "result.message": "a" * 2000,
        },
    )
    before = copy.deepcopy(wire)
    reading = read_document(RLJobStatus, wire, AS_FAR_AS_READABLE)
    assert wire == before
    left: Json = {"attempts": attempts[16:], "counters.attempts": REMOVED, "pools": [], "result.message": "a" * 1024}
    assert reading.value == RLJobStatus.from_wire(edited(golden("status"), left))
    assert reading.unknown_fields == ("mood",)
    assert {(wire_path(each["loc"]), each["type"]) for each in reading.unreadable_parts} == {
        ("attempts", "too_long"),
        ("counters.attempts", "int_type"),
        ("pools[0].ready", "int_type"),
        ("pools[0].ready", "missing"),
        ("result.message", "string_too_long"),
    }
    for nothing in ("Running", [], 3):
        assert read_document(RLJobStatus, nothing, AS_FAR_AS_READABLE).value == RLJobStatus()


def test_the_run_state_of_version_1_is_read() -> None:
    state = load_run_state(json.dumps(golden("run_state")))
    assert (state.job_name, state.attempt, state.phase, state.resumed_from_step) == ("example", 2, RunPhase.FAILED, 4)
    assert (state.progress.step, state.progress.total_steps, state.progress.eta_seconds) == (7, 10, 90)
    assert state.checkpoint is not None
    assert state.checkpoint.step == 6
    assert state.alarms is not None
    assert [(alarm.reason, alarm.value) for alarm in state.alarms] == [("ResponsesCutOff", 0.75)]
    assert state.error is not None
    assert state.error.message == "worker rank 1 died"
    assert json.loads(dump_run_state(state)) == golden("run_state")


@pytest.mark.parametrize("version", [{}, NEXT], ids=["this version", "the next version"])
def test_the_known_fields_of_a_newer_run_state_are_read(version: Json) -> None:
    additions = {
        "gpus": 8,
        "progress.episode": 3,
        "checkpoint.roles": ["actor"],
        "error.retry": {"after": 5},
        "alarms[0].chart": "response_length/clip_ratio",
        "queue": None,
    }
    read = load_run_state(json.dumps(edited(golden("run_state"), version | additions)))
    assert read.model_copy(update={"contract_version": 1}) == load_run_state(json.dumps(golden("run_state")))


def test_unknown_alarms_are_read_and_unreadable_ones_left_out() -> None:
    """Alarms are for people: whatever a newer trainer reports, its state stays readable."""
    known = load_run_state(json.dumps(golden("run_state")))
    unknown = load_run_state(json.dumps(edited(golden("run_state"), {"alarms[0].reason": "EntropyCollapse"})))
    assert unknown.alarms is not None
    assert unknown.alarms[0].reason == "EntropyCollapse"
    one = known.alarms[0].to_wire() if known.alarms else {}
    unreadable: list[Json] = [
        {"alarms[0].message": "a" * 513},
        {"alarms[0].reason": "two words"},
        {"alarms": [one] * 17},
        {"alarms": {}},
    ]
    for change in unreadable:
        read = load_run_state(json.dumps(edited(golden("run_state"), change)))
        assert read.alarms is None
        assert read.progress == known.progress
    older = load_run_state(json.dumps(edited(golden("run_state"), {"alarms": REMOVED})))
    assert older.alarms is None


def test_a_run_state_with_an_unknown_meaning_is_rejected() -> None:
    with pytest.raises(DocumentError) as caught:
        load_run_state(json.dumps(edited(golden("run_state"), {"phase": "Pausing", "queue": "x"})))
    phases = "Starting, Running, Stopping, Complete, Failed, Stopped"
    assert str(caught.value) == Mentions("run state: phase:", phases, '(seen: "Pausing")')
    with pytest.raises(DocumentError, match=r"^run state: .*contract versions 1 to 2 \(seen: 3\)"):
        load_run_state(json.dumps(golden("run_state") | AFTER_NEXT))


def test_the_job_of_version_1_is_read() -> None:
    job = load_job(json.dumps(golden("trainer_job")))
    training = job.spec.training
    assert (job.name, job.namespace, job.spec.pools[0].nodes) == ("example", "team", 2)
    assert [(reward.name, reward.weight) for reward in training.rewards] == [("score", 0.5), ("style", 1.0)]
    assert training.algorithm.loss.clipped is not None
    assert (training.rollout.temperature, training.algorithm.loss.clipped.clip_ratio_high) == (0.7, 0.3)
    assert json.loads(dump_job(job)) == golden("trainer_job")


@pytest.mark.parametrize("version", [{}, NEXT], ids=["this version", "the next version"])
def test_a_newer_job_whose_new_fields_are_empty_is_read(version: Json) -> None:
    empty: Json = {"spec.queue": None, "spec.training.environments": [], "spec.training.model.moe": {}, "team": ""}
    read = load_job(json.dumps(edited(golden("trainer_job"), version | empty)))
    assert read.spec == load_job(json.dumps(golden("trainer_job"))).spec


def test_a_newer_job_with_a_new_setting_is_rejected_by_the_name_of_the_field() -> None:
    additions = {"spec.queue": "research", "spec.pools[0].spot": False}
    with pytest.raises(DocumentError) as caught:
        load_job(json.dumps(edited(golden("trainer_job"), NEXT | additions)))
    for field, seen in (("spec.pools[0].spot", "false"), ("spec.queue", '"research"')):
        words = rf"{re.escape(field)}: [^;]*older than the operator \(seen: {seen}\); use an image"
        assert re.search(words, str(caught.value))
    with pytest.raises(DocumentError, match=r"^job: .*contract versions 1 to 2 \(seen: 3\)"):
        load_job(json.dumps(golden("trainer_job") | AFTER_NEXT))


def test_unknown_fields_for_the_operator_do_not_stop_a_trainer() -> None:
    additions: Json = {"spec.runPolicy.patience": "Long", "spec.runPolicy.elastic": {"minNodes": 1, "pause": {"x": 1}}}
    read = load_job(json.dumps(edited(golden("trainer_job"), NEXT | additions)))
    assert read.spec.training == load_job(json.dumps(golden("trainer_job"))).spec.training
    with pytest.raises(DocumentError, match=r"^job: spec\.runPolicyOfTheQueue: .*older than the operator"):
        load_job(json.dumps(edited(golden("trainer_job"), NEXT | {"spec.runPolicyOfTheQueue": {"a": 1}})))


def test_the_trainer_gets_only_the_fields_of_the_run_policy_that_it_reads() -> None:
    """So an image that knows fewer of its fields, and rejects unknown ones, can run the job."""
    policy = {"provisioningDeadlineSeconds": 77, "elastic": {"minNodes": 1}, "stallDeadlineSeconds": 60}
    spec = RLJob.from_wire(valid_job({"spec.runPolicy": policy})).spec
    written = json.loads(dump_job(TrainerJob(name="example", spec=spec)))
    assert written["spec"]["runPolicy"] == {"provisioningDeadlineSeconds": 77}
    assert load_job(json.dumps(written)).spec.run_policy.provisioning_deadline_seconds == 77


def test_defaults_that_a_server_filled_in_do_not_reach_the_trainer() -> None:
    """A server fills in the defaults of its own version, which the trainer in the image may not know."""
    spec = RLJob.from_wire(valid_job()).spec
    filled_in = RLJobSpec.from_wire(spec.to_full_wire())
    assert filled_in.model_fields_set > spec.model_fields_set
    written = json.loads(dump_job(TrainerJob(name="example", spec=filled_in)))
    assert written["spec"] == valid_job({"spec.pools[0].nodes": REMOVED})["spec"]


def test_the_manifest_of_version_1_is_read(tmp_path: Path) -> None:
    manifest, _ = read_manifest(sealed_manifest(tmp_path, golden("manifest")))
    assert (manifest.step, manifest.start_number, manifest.world_size) == (6, 2, 1)
    assert [tensor.name for tensor in manifest.tensors] == ["model.w"]
    state = state_of(manifest)
    assert (state.step, state.parts.cursor.ordinal, state.parts.kl_coefficient) == (6, 48, 0.001)


@pytest.mark.parametrize("field", ["isEvaluated", "choices", "parts", "parts.cursor", "parts.cursor.digest"])
def test_a_checkpoint_without_a_required_field_is_rejected(tmp_path: Path, field: str) -> None:
    manifest, _ = read_manifest(sealed_manifest(tmp_path, edited(golden("manifest"), {f"extra.{field}": REMOVED})))
    message = rf"^checkpoint of step 6: its controller state is invalid \({re.escape(field)}: Field required\)"
    with pytest.raises(CheckpointError, match=message):
        state_of(manifest)


@pytest.mark.parametrize("version", [{}, NEXT], ids=["this version", "the next version"])
def test_the_known_fields_of_a_newer_manifest_are_read(
    tmp_path: Path, version: Json, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"news{version.get('contractVersion', '')}"
    additions = {
        name: 1,
        f"files[0].{name}": "x",
        f"tensors[0].pieces[0].{name}": [1],
        f"extra.parts.{name}": {"a": 1},
        f"extra.parts.cursor.{name}": {"a": 1},
    }
    folder = sealed_manifest(tmp_path, edited(golden("manifest"), version | additions))
    with caplog.at_level(logging.WARNING):
        newer, _ = read_manifest(folder)
        again, _ = read_manifest(folder)
        state = state_of(newer)
    manifest, _ = read_manifest(sealed_manifest(tmp_path, golden("manifest")))
    known = {"contract_version": 1, "extra": manifest.extra}
    assert newer.model_copy(update=known) == again.model_copy(update=known) == manifest
    assert state == state_of(manifest)
    assert [record.message.partition(" is not known")[0] for record in caplog.records] == [
        f"manifest.json: files[].{name}",
        f"manifest.json: {name}",
        f"manifest.json: tensors[].pieces[].{name}",
        f"the checkpoint's state: parts.cursor.{name}",
        f"the checkpoint's state: parts.{name}",
    ]


def test_a_manifest_of_a_version_after_the_next_is_rejected(tmp_path: Path) -> None:
    folder = sealed_manifest(tmp_path, golden("manifest") | AFTER_NEXT)
    with pytest.raises(DamagedError, match=r"contractVersion 3; .* contract versions 1 to 2"):
        read_manifest(folder)


def sealed_manifest(root: Path, document: Json) -> Path:
    """A checkpoint's folder with only its manifest."""
    content = json.dumps(document, separators=(",", ":")).encode()
    folder = root / "step-00000006.start-0002"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(b'{"content":' + content + f',"digest":"{digest_of(content)}"}}\n'.encode())
    return folder
