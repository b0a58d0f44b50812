"""Documents that one program writes and another reads, each with the version of its form.

The job goes to the trainer as one JSON document in an environment variable; RunState comes back as a file.
"""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import ValidationError

from rljob_api.base import WireModel
from rljob_api.constants import CONTRACT_VERSION, MAX_SPEC_BYTES, OLDEST_READABLE_CONTRACT_VERSION
from rljob_api.errors import HandoverError
from rljob_api.pydantic_messages import plain_message, spread_out
from rljob_api.run_state import RunState
from rljob_api.scalars import PositiveCount
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.yaml_text import wire_path

DocumentT = TypeVar("DocumentT", bound=WireModel)


class TrainerJob(WireModel):
    """Everything that the trainer knows about its job."""

    contract_version: PositiveCount = CONTRACT_VERSION
    name: str
    namespace: str | None = None
    uid: str | None = None
    """UID of the resource on a cluster; unset locally."""
    spec: RLJobSpec


def dump_job(job: TrainerJob) -> str:
    """The document for `RLJOB_SPEC`. Raises HandoverError above `MAX_SPEC_BYTES`."""
    text = _dump(job, job.contract_version)
    size = len(text.encode())
    if size > MAX_SPEC_BYTES:
        raise HandoverError(
            f"job {job.name}: its spec is {size} bytes as JSON, more than {MAX_SPEC_BYTES}; shorten the free-form parts"
            " (reasoningGym.config, affinity, env values) or move them into a ConfigMap"
        )
    return text


def load_job(text: str) -> TrainerJob:
    """The job that `dump_job` wrote. Raises HandoverError for damage and for versions that cannot be read here."""
    return _load(TrainerJob, text, "job")


def dump_run_state(state: RunState) -> str:
    """The content of the run state file."""
    return _dump(state, state.contract_version)


def load_run_state(text: str) -> RunState:
    """The state that `dump_run_state` wrote. Raises HandoverError for damage and for unreadable versions."""
    return _load(RunState, text, "run state")


def _dump(document: WireModel, version: int) -> str:
    """One line of JSON. The version is written even if it was left to its default; other unset fields are not."""
    return json.dumps({"contractVersion": version} | document.to_wire(), separators=(",", ":"), ensure_ascii=False)


def _load(kind: type[DocumentT], text: str, what: str) -> DocumentT:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise HandoverError(f"{what}: this is not JSON ({error}); it was cut or written by something else") from None
    if not isinstance(data, dict):
        raise HandoverError(f"{what}: an object was expected (seen: {type(data).__name__}); check what wrote it")
    version = data.get("contractVersion")
    if type(version) is not int or not OLDEST_READABLE_CONTRACT_VERSION <= version <= CONTRACT_VERSION:
        raise HandoverError(
            f"{what}: contract versions {OLDEST_READABLE_CONTRACT_VERSION} to {CONTRACT_VERSION} can be read here"
            f" (seen: {json.dumps(version)}); use an image and an operator of neighbouring versions"
        )
    try:
        return kind.from_wire(data)
    except ValidationError as error:
        found = "; ".join(
            f"{wire_path(details['loc'])}: {plain_message(details, kind)}"
            for details in spread_out(error.errors(include_url=False))
        )
        raise HandoverError(f"{what}: {found}") from None
