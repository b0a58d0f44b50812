"""JSON documents that operator and trainer exchange, each with a contract version.

The operator passes the job to the trainer in an environment variable (`TrainerJob`); the trainer reports back in a file
(`RunState`). Operator and trainer image may differ by one contract version: `tolerant_reading` defines how unknown
fields are treated. The job for the trainer contains only those fields of the run policy that the trainer reads.
"""

from __future__ import annotations

import json

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.base import WireModel
from rljob_api.constants import (
    CONTRACT_VERSION,
    MAX_SPEC_BYTES,
    NEWEST_READABLE_CONTRACT_VERSION,
    OLDEST_READABLE_CONTRACT_VERSION,
)
from rljob_api.errors import DocumentError
from rljob_api.pydantic_messages import follows_from_another, plain_message
from rljob_api.run_state import RunState
from rljob_api.scalars import PositiveCount
from rljob_api.tolerant_reading import RUN_STATE, TRAINER_JOB, ModelT, Policy, read_document
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.yaml_text import wire_path


class TrainerJob(WireModel):
    """The job as the trainer receives it."""

    contract_version: PositiveCount = CONTRACT_VERSION
    name: str
    namespace: str | None = None
    uid: str | None = None
    """UID of the resource on a cluster; unset locally."""
    spec: RLJobSpec


def dump_job(job: TrainerJob) -> str:
    """The JSON document for `RLJOB_SPEC`, without fields that equal their default, and without fields of the run policy
    that only the operator reads. Raises DocumentError if it has more than `MAX_SPEC_BYTES` bytes."""
    text = _dump(_without_operator_policy(job).to_wire_without_defaults(), job.contract_version)
    size = len(text.encode())
    if size > MAX_SPEC_BYTES:
        raise DocumentError(
            f"job {job.name}: the spec must have at most {MAX_SPEC_BYTES} bytes as JSON (seen: {size}); shorten"
            " reasoningGym.config, annotations or env values, or move env values into a ConfigMap"
        )
    return text


def load_job(text: str) -> TrainerJob:
    """Reads a document that `dump_job` wrote, of this or a neighbouring contract version.

    Raises DocumentError for a damaged document, for an unsupported version, and for an unknown field that is not empty,
    except in the run policy."""
    return _read(text, "job", TrainerJob, TRAINER_JOB)


def dump_run_state(state: RunState) -> str:
    """The JSON content of the run state file."""
    return _dump(state.to_wire(), state.contract_version)


def load_run_state(text: str) -> RunState:
    """Reads a document that `dump_run_state` wrote, of this or a neighbouring contract version; ignores unknown fields.
    Raises DocumentError for a damaged document or an unsupported version."""
    return _read(text, "run state", RunState, RUN_STATE)


def readable_versions() -> str:
    """The supported contract versions, for messages: `contract versions 1 to 2`."""
    return f"contract versions {OLDEST_READABLE_CONTRACT_VERSION} to {NEWEST_READABLE_CONTRACT_VERSION}"


def is_readable_version(version: object) -> bool:
    """Whether this program supports documents of this contract version. A document of a newer supported version may
    still have fields that this program cannot read."""
    return type(version) is int and OLDEST_READABLE_CONTRACT_VERSION <= version <= NEWEST_READABLE_CONTRACT_VERSION


def _without_operator_policy(job: TrainerJob) -> TrainerJob:
    """The job with only the provisioning deadline in its run policy: the trainer reads no other field of the policy."""
    policy = RunPolicy(provisioning_deadline_seconds=job.spec.run_policy.provisioning_deadline_seconds)
    return job.model_copy(update={"spec": job.spec.model_copy(update={"run_policy": policy})})


def _dump(wire: dict[str, object], version: int) -> str:
    """One line of JSON. The version is always written, also if it is the default."""
    return json.dumps({"contractVersion": version} | wire, separators=(",", ":"), ensure_ascii=False)


def _read(text: str, what: str, kind: type[ModelT], policy: Policy) -> ModelT:
    try:
        return read_document(kind, _parsed(text, what), policy).value
    except ValidationError as error:
        raise DocumentError(f"{what}: {_error_text(error, kind)}") from None
    except RecursionError:
        raise DocumentError(f"{what}: too many nested levels; check the program that wrote it") from None


def _parsed(text: str, what: str) -> dict[str, object]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DocumentError(
            f"{what}: must be JSON ({error}); check that it is complete, and the program that wrote it"
        ) from None
    if not isinstance(data, dict):
        raise DocumentError(
            f"{what}: must be a JSON object (seen: {type(data).__name__}); check the program that wrote it"
        )
    version = data.get("contractVersion")
    if not is_readable_version(version):
        raise DocumentError(
            f"{what}: this program supports {readable_versions()} (seen: {json.dumps(version)}); use an image and an"
            " operator whose contract versions differ by at most one, best of the same version"
        )
    return data


def _error_text(error: ValidationError, kind: type[WireModel]) -> str:
    details = (each for each in error.errors(include_url=False) if not follows_from_another(each))
    return "; ".join(f"{wire_path(each['loc'])}: {_message(each, kind)}" for each in details)


def _message(error: ErrorDetails, kind: type[WireModel]) -> str:
    if kind is TrainerJob and error["type"] == "extra_forbidden":
        seen = json.dumps(error["input"], ensure_ascii=False)
        return (
            f"is not a known field of this trainer, which is older than the operator (seen: {seen:.60}); use an image"
            " of the operator's version, or remove the field"
        )
    return plain_message(error, kind)
