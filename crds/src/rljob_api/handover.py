"""Documents that one program writes and another reads, each with the version of its form.

The job goes to the trainer as one JSON document in an environment variable; RunState comes back as a file. Operator and
image may be of neighbouring versions; what is done with fields that the reader does not know, `tolerant_reading` says.
Of the run policy, which the operator carries out, the trainer is told no more than it reads.
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
from rljob_api.errors import HandoverError
from rljob_api.pydantic_messages import is_echo, plain_message
from rljob_api.run_state import RunState
from rljob_api.scalars import PositiveCount
from rljob_api.tolerant_reading import RUN_STATE, TRAINER_JOB, ModelT, Policy, read_document
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.yaml_text import wire_path


class TrainerJob(WireModel):
    """Everything that the trainer knows about its job."""

    contract_version: PositiveCount = CONTRACT_VERSION
    name: str
    namespace: str | None = None
    uid: str | None = None
    """UID of the resource on a cluster; unset locally."""
    spec: RLJobSpec


def dump_job(job: TrainerJob) -> str:
    """The document for `RLJOB_SPEC`, without what equals its default, and without what only the operator reads of the
    run policy. Raises HandoverError above `MAX_SPEC_BYTES`."""
    text = _dump(_as_the_trainer_reads_it(job).to_wire_without_defaults(), job.contract_version)
    size = len(text.encode())
    if size > MAX_SPEC_BYTES:
        raise HandoverError(
            f"job {job.name}: its spec is {size} bytes as JSON, more than {MAX_SPEC_BYTES}; shorten"
            " reasoningGym.config, annotations or env values, or move env values into a ConfigMap"
        )
    return text


def load_job(text: str) -> TrainerJob:
    """The job that `dump_job` wrote, by a version before this one, of this one, or after it. Raises HandoverError for
    damage, for versions that cannot be read here, and for a field that is set and unknown here, but in its run policy.
    """
    return _read(text, "job", TrainerJob, TRAINER_JOB)


def dump_run_state(state: RunState) -> str:
    """The content of the run state file."""
    return _dump(state.to_wire(), state.contract_version)


def load_run_state(text: str) -> RunState:
    """The state that `dump_run_state` wrote, by a version before this one, of this one, or after it; what it says in
    fields that are unknown here is left out. Raises HandoverError for damage, and for what cannot be read here."""
    return _read(text, "run state", RunState, RUN_STATE)


def readable_versions() -> str:
    """The contract versions that are read here, for messages."""
    return f"contract versions {OLDEST_READABLE_CONTRACT_VERSION} to {NEWEST_READABLE_CONTRACT_VERSION}"


def is_readable_version(version: object) -> bool:
    """Whether documents of this contract version are read here. Of a newer one, its fields decide."""
    return type(version) is int and OLDEST_READABLE_CONTRACT_VERSION <= version <= NEWEST_READABLE_CONTRACT_VERSION


def _as_the_trainer_reads_it(job: TrainerJob) -> TrainerJob:
    """How long its pools are waited for is all of the run policy that it reads."""
    policy = RunPolicy(provisioning_deadline_seconds=job.spec.run_policy.provisioning_deadline_seconds)
    return job.model_copy(update={"spec": job.spec.model_copy(update={"run_policy": policy})})


def _dump(wire: dict[str, object], version: int) -> str:
    """One line of JSON. The version is written even if it was left to its default."""
    return json.dumps({"contractVersion": version} | wire, separators=(",", ":"), ensure_ascii=False)


def _read(text: str, what: str, kind: type[ModelT], policy: Policy) -> ModelT:
    try:
        return read_document(kind, _versioned(text, what), policy).value
    except ValidationError as error:
        raise HandoverError(f"{what}: {_found(error, kind)}") from None
    except RecursionError:
        raise HandoverError(f"{what}: it is nested too deep to be read; check what wrote it") from None


def _versioned(text: str, what: str) -> dict[str, object]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise HandoverError(f"{what}: this is not JSON ({error}); it was cut or written by something else") from None
    if not isinstance(data, dict):
        raise HandoverError(f"{what}: an object was expected (seen: {type(data).__name__}); check what wrote it")
    version = data.get("contractVersion")
    if not is_readable_version(version):
        raise HandoverError(
            f"{what}: {readable_versions()} can be read here (seen: {json.dumps(version)}); use an image and an"
            " operator of neighbouring versions"
        )
    return data


def _found(error: ValidationError, kind: type[WireModel]) -> str:
    details = (each for each in error.errors(include_url=False) if not is_echo(each))
    return "; ".join(f"{wire_path(each['loc'])}: {_message(each, kind)}" for each in details)


def _message(error: ErrorDetails, kind: type[WireModel]) -> str:
    if kind is TrainerJob and error["type"] == "extra_forbidden":
        seen = json.dumps(error["input"], ensure_ascii=False)
        return (
            f"is not known to this trainer (seen: {seen:.60}), which is older than the operator that sent it; use an"
            " image of the operator's version, or remove the field"
        )
    return plain_message(error, kind)
