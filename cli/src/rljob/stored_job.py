"""Parses an RLJob from the API server. An operator or a CRD of another version may have written it.

Unknown fields are ignored. Fields of the status that cannot be parsed are left out and listed, and fields of the spec
that cannot be parsed get their defaults. So a command can show a job even if it does not understand a field. Only
`StoredJob.spec` is stricter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob.errors import ClusterError
from rljob.job_conditions import Ending, ending, waits_for
from rljob.kubernetes_models import Json, ObjectMeta
from rljob.plain_text import one_line
from rljob_api.base import WireModel
from rljob_api.constants import PHASE_BEFORE_STATUS
from rljob_api.standard_streams import printable
from rljob_api.tolerant_reading import AS_FAR_AS_READABLE, STORED_SPEC, read_document
from rljob_api.v1alpha1.checkpoint import Checkpoint, CheckpointStorage, ExportHuggingFace, Resume
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import ManagedBy, RLJobSpec
from rljob_api.v1alpha1.status import ConditionStatus, RLJobStatus
from rljob_api.yaml_text import wire_path

ModelT = TypeVar("ModelT", bound=WireModel)

UNREADABLE = "?"
"""Shown instead of a value that this version cannot parse."""
_MAX_CHARACTERS = 40
"""The largest number of characters that are shown of a value that cannot be parsed."""
OTHER_VERSION = (
    "the cluster's operator may have another version than this command: install the `rljob` of that version, or see the"
    " whole RLJob with --output yaml"
)


@dataclass(frozen=True)
class StoredJob:
    """A job, as far as this version can parse it."""

    metadata: ObjectMeta
    status: RLJobStatus
    wire: Mapping[str, object]
    """The whole RLJob, as the API server sent it."""
    unparsed_fields: tuple[str, ...] = ()
    """Status fields that cannot be parsed, with their values: `status.pools[0].ready (seen: "all")`."""

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.metadata.name

    @property
    def phase(self) -> str:
        """The phase for users: `Deleting` while the job is being deleted, `?` if the phase cannot be parsed, `New`
        before an operator has processed the job; else the phase in the status."""
        if self.metadata.deletion_timestamp is not None:
            return "Deleting"
        if self.status.phase is None and self.is_unparsed("phase"):
            return UNREADABLE
        return self.status.phase or PHASE_BEFORE_STATUS

    @property
    def reason(self) -> str:
        """The reason for the job's phase, such as `Unschedulable`; empty if there is none."""
        if self.status.reason is not None:
            return self.status.reason
        found = self.ending or waits_for(self.status)
        return "" if found is None else found.reason

    @property
    def ending(self) -> Ending | None:
        """How the job finished; None if it has not finished."""
        return ending(self.status)

    def is_unparsed(self, field: str) -> bool:
        """Whether this status field, a part of it, or the whole status cannot be parsed by this version."""
        starts = ("status (", *(f"status.{field}{end}" for end in " .["))
        return any(path.startswith(starts) for path in self.unparsed_fields)

    @property
    def where(self) -> str:
        """Name of the job in messages, such as `RLJob team-a/my-job`."""
        return f"RLJob {self.metadata.namespace}/{self.metadata.name}"

    @property
    def unparsed_note(self) -> str:
        """A line about the fields that cannot be parsed; empty if there are none."""
        fields = one_line("; ".join(self.unparsed_fields))
        return f"cannot be parsed: {fields}; {OTHER_VERSION}" if fields else ""

    @property
    def wants_suspend(self) -> bool:
        """The value of `spec.suspend`."""
        return self._spec_wire().get("suspend") is True

    @property
    def other_controller(self) -> str | None:
        """The controller in `spec.managedBy` that runs the job instead of RLJob's operator; None if the operator runs
        it."""
        given = self._spec_wire().get("managedBy")
        return given if isinstance(given, str) and given not in ("", ManagedBy.OPERATOR) else None

    @cached_property
    def run_policy(self) -> RunPolicy:
        """`spec.runPolicy`, with this version's defaults for fields that cannot be parsed."""
        return self._block(RunPolicy, "runPolicy")

    @property
    def storage(self) -> CheckpointStorage | None:
        """`spec.checkpoint.storage`."""
        return self._block(Checkpoint, "checkpoint").storage

    @property
    def image(self) -> str | None:
        """`spec.image`."""
        given = self._spec_wire().get("image")
        return given if isinstance(given, str) else None

    @property
    def service_account(self) -> str | None:
        """`spec.serviceAccountName`."""
        given = self._spec_wire().get("serviceAccountName")
        return given if isinstance(given, str) else None

    @property
    def image_pull_secrets(self) -> list[str]:
        """The names of the Secrets in `spec.imagePullSecrets`."""
        given = self._spec_wire().get("imagePullSecrets")
        entries = [entry for entry in given if isinstance(entry, dict)] if isinstance(given, list) else []
        return [name for entry in entries if isinstance(name := entry.get("name"), str)]

    @property
    def resume(self) -> Resume:
        """`spec.checkpoint.resume`."""
        return self._block(Checkpoint, "checkpoint").resume

    @property
    def export(self) -> ExportHuggingFace:
        """`spec.checkpoint.exportHuggingFace`."""
        return self._block(Checkpoint, "checkpoint").export_hugging_face

    @property
    def pool_sizes(self) -> dict[str, int]:
        """Number of nodes by the name of the pool."""
        pools = self._spec_wire().get("pools")
        entries = [entry for entry in pools if isinstance(entry, dict)] if isinstance(pools, list) else []
        return {str(entry.get("name")): nodes for entry in entries if isinstance(nodes := entry.get("nodes", 1), int)}

    def spec(self) -> RLJobSpec:
        """The whole spec. Raises ClusterError if this version cannot parse it, for example because it has a newer
        schema."""
        try:
            return read_document(RLJobSpec, self.wire.get("spec"), STORED_SPEC).value
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = ".".join(str(part) for part in first["loc"])
            raise ClusterError(f"{self.where}: {path} cannot be parsed ({first['msg']}); {OTHER_VERSION}") from None

    def _block(self, kind: type[ModelT], name: str) -> ModelT:
        """A block of the spec, with this version's defaults for fields that cannot be parsed."""
        return read_document(kind, self._spec_wire().get(name) or {}, AS_FAR_AS_READABLE).value

    def _spec_wire(self) -> Json:
        spec = self.wire.get("spec")
        return spec if isinstance(spec, dict) else {}


def stored_job(wire: Mapping[str, object]) -> StoredJob:
    """Parses a job from a response of the API server. It never fails: unknown fields are ignored, and fields that
    cannot be parsed are left out."""
    metadata = ObjectMeta.model_validate(wire.get("metadata"))
    given = _without_control_characters(wire.get("status") or {})
    conditions, unknown = _known_statuses(given.get("conditions") if isinstance(given, dict) else None)
    readable = {**given, "conditions": conditions} if isinstance(given, dict) and conditions is not None else given
    reading = read_document(RLJobStatus, readable, AS_FAR_AS_READABLE)
    return StoredJob(metadata, reading.value, wire, (*unknown, *map(_unparsed_field, reading.unreadable_parts)))


def _without_control_characters(status: object) -> object:
    """The status without control characters in its strings, because these could control the terminal. Only
    `handledRequests` stays unchanged, because its values are compared with requests and not printed."""
    if isinstance(status, dict):
        return {
            name: value if name == "handledRequests" else _without_control_characters(value)
            for name, value in status.items()
        }
    if isinstance(status, list):
        return [_without_control_characters(value) for value in status]
    return printable(status) if isinstance(status, str) else status


def _unparsed_field(part: ErrorDetails) -> str:
    shown = json.dumps(part["input"], ensure_ascii=False, default=str)
    seen = f"seen: {shown if len(shown) <= _MAX_CHARACTERS else f'{shown[:_MAX_CHARACTERS]}...'}"
    return f"{wire_path(('status', *part['loc']))} ({'missing' if part['type'] == 'missing' else seen})"


def _known_statuses(conditions: object) -> tuple[object, tuple[str, ...]]:
    """The conditions with Unknown instead of each status that this version does not know, and a list of those."""
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
