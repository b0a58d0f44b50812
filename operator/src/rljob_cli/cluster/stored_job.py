"""An RLJob as an API server has it, which an operator and a CRD of other versions may have written.

It is read as far as it can be read here: what is unknown is passed over, what cannot be read is left out and named.
What a command shows of a job must not hang on one field that it does not know; programs that act on what they read are
stricter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.base import WireModel
from rljob_api.standard_streams import printable
from rljob_api.tolerant_reading import AS_FAR_AS_READABLE, STORED_SPEC, read_document
from rljob_api.v1alpha1.checkpoint import Checkpoint, CheckpointStorage, Resume
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import ConditionStatus, RLJobStatus
from rljob_api.yaml_text import wire_path
from rljob_cli.cluster.objects import Json, ObjectMeta
from rljob_cli.errors import CliError

ModelT = TypeVar("ModelT", bound=WireModel)

_LONGEST_SHOWN = 40
OTHER_VERSION = (
    "the cluster's operator is of another version than this command: install the `rljob` of its version, or look at"
    " the whole of it with --output yaml"
)


@dataclass(frozen=True)
class StoredJob:
    """A job, as far as it can be read here."""

    metadata: ObjectMeta
    status: RLJobStatus
    wire: Mapping[str, object]
    unread: tuple[str, ...] = ()
    """What of the status cannot be read here, with its value: `status.pools[0].ready (seen: "all")`."""

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"RLJob {self.metadata.namespace}/{self.metadata.name}"

    @property
    def is_to_be_suspended(self) -> bool:
        """What `spec.suspend` asks for."""
        return self._spec_wire().get("suspend") is True

    @cached_property
    def run_policy(self) -> RunPolicy:
        """`spec.runPolicy`, with the defaults of this version for what cannot be read here."""
        return self._block(RunPolicy, "runPolicy")

    @property
    def storage(self) -> CheckpointStorage | None:
        """`spec.checkpoint.storage`."""
        return self._block(Checkpoint, "checkpoint").storage

    @property
    def resume(self) -> Resume:
        """`spec.checkpoint.resume`."""
        return self._block(Checkpoint, "checkpoint").resume

    @property
    def pool_sizes(self) -> dict[str, int]:
        """Number of nodes by name of the pool."""
        pools = self._spec_wire().get("pools")
        entries = [entry for entry in pools if isinstance(entry, dict)] if isinstance(pools, list) else []
        return {str(entry.get("name")): nodes for entry in entries if isinstance(nodes := entry.get("nodes", 1), int)}

    def spec(self) -> RLJobSpec:
        """What is wanted, all of it. Raises CliError if a newer schema made it unreadable here."""
        try:
            return read_document(RLJobSpec, self.wire.get("spec"), STORED_SPEC).value
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise CliError(f"{self.where}: {place} cannot be read ({first['msg']}); {OTHER_VERSION}") from None

    def _block(self, kind: type[ModelT], name: str) -> ModelT:
        return read_document(kind, self._spec_wire().get(name) or {}, AS_FAR_AS_READABLE).value

    def _spec_wire(self) -> Json:
        spec = self.wire.get("spec")
        return spec if isinstance(spec, dict) else {}


def stored_job(wire: Mapping[str, object]) -> StoredJob:
    """The job in an answer of the API server. Fields that are unknown here are passed over, and what cannot be read is
    left out: one look at it must always be possible."""
    metadata = ObjectMeta.model_validate(wire.get("metadata"))
    given = _without_control_characters(wire.get("status") or {})
    conditions, unknown = _known_statuses(given.get("conditions") if isinstance(given, dict) else None)
    readable = {**given, "conditions": conditions} if isinstance(given, dict) and conditions is not None else given
    reading = read_document(RLJobStatus, readable, AS_FAR_AS_READABLE)
    return StoredJob(metadata, reading.value, wire, (*unknown, *map(_unread, reading.unreadable_parts)))


def _without_control_characters(status: object) -> object:
    """The status with texts that cannot steer a terminal. Requests stay as they are: they are compared, not shown."""
    if isinstance(status, dict):
        return {
            name: value if name == "handledRequests" else _without_control_characters(value)
            for name, value in status.items()
        }
    if isinstance(status, list):
        return [_without_control_characters(value) for value in status]
    return printable(status) if isinstance(status, str) else status


def _unread(part: ErrorDetails) -> str:
    shown = json.dumps(part["input"], ensure_ascii=False, default=str)
    seen = f"seen: {shown if len(shown) <= _LONGEST_SHOWN else f'{shown[:_LONGEST_SHOWN]}...'}"
    return f"{wire_path(('status', *part['loc']))} ({'missing' if part['type'] == 'missing' else seen})"


def _known_statuses(conditions: object) -> tuple[object, tuple[str, ...]]:
    """The conditions with Unknown for each status that this version has no word for, and which these were."""
    if not isinstance(conditions, list):
        return conditions, ()
    known, unknown = [], []
    for index, entry in enumerate(conditions):
        status = entry.get("status") if isinstance(entry, dict) else None
        if isinstance(status, str) and status not in list(ConditionStatus):
            unknown.append(f'status.conditions[{index}].status (seen: "{status}")')
            known.append({**entry, "status": ConditionStatus.UNKNOWN.value})
        else:
            known.append(entry)
    return known, tuple(unknown)
