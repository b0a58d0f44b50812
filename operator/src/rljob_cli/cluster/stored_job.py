"""An RLJob as an API server has it, which an operator and a CRD of other versions may have written.

It is read as far as it can be read here: what is unknown is passed over, what cannot be read is left out and named.
What a command shows of a job must not hang on one field that it does not know; programs that act on what they read are
stricter.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.base import WireModel
from rljob_api.v1alpha1.checkpoint import Checkpoint, CheckpointStorage, Resume
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import ConditionStatus, RLJobStatus
from rljob_api.yaml_text import Path, wire_path
from rljob_cli.cluster.objects import Json, ObjectMeta
from rljob_cli.errors import CliError

OTHER_VERSION = (
    "the cluster's operator is of another version than this command: install the `rljob` of its version, or look at"
    " the whole of it with --output yaml"
)


ModelT = TypeVar("ModelT", bound=WireModel)

_LONGEST_SHOWN = 40


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
        return readable_part(RunPolicy, self._spec_wire().get("runPolicy") or {}, "spec.runPolicy")[0]

    @property
    def storage(self) -> CheckpointStorage | None:
        """`spec.checkpoint.storage`."""
        return self._checkpoint().storage

    @property
    def resume(self) -> Resume:
        """`spec.checkpoint.resume`."""
        return self._checkpoint().resume

    @property
    def pool_sizes(self) -> dict[str, int]:
        """Number of nodes by name of the pool."""
        pools = self._spec_wire().get("pools")
        entries = [entry for entry in pools if isinstance(entry, dict)] if isinstance(pools, list) else []
        return {str(entry.get("name")): nodes for entry in entries if isinstance(nodes := entry.get("nodes", 1), int)}

    def spec(self) -> RLJobSpec:
        """What is wanted, all of it. Raises CliError if a newer schema made it unreadable here."""
        try:
            return RLJobSpec.model_validate(self.wire.get("spec"), by_alias=True, by_name=False, extra="ignore")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise CliError(f"{self.where}: {place} cannot be read ({first['msg']}); {OTHER_VERSION}") from None

    def _checkpoint(self) -> Checkpoint:
        return readable_part(Checkpoint, self._spec_wire().get("checkpoint") or {}, "spec.checkpoint")[0]

    def _spec_wire(self) -> Json:
        spec = self.wire.get("spec")
        return spec if isinstance(spec, dict) else {}


def stored_job(wire: Mapping[str, object]) -> StoredJob:
    """The job in an answer of the API server. Fields that are unknown here are passed over, and what cannot be read is
    left out: one look at it must always be possible."""
    metadata = ObjectMeta.model_validate(wire.get("metadata"))
    given = wire.get("status") or {}
    conditions, unknown = _known_statuses(given.get("conditions") if isinstance(given, dict) else None)
    readable = {**given, "conditions": conditions} if isinstance(given, dict) and conditions is not None else given
    status, unread = readable_part(RLJobStatus, readable, "status")
    return StoredJob(metadata, status, wire, unknown + unread)


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


def readable_part(kind: type[ModelT], wire: object, name: str) -> tuple[ModelT, tuple[str, ...]]:
    """The value, and what of it cannot be read here, such as `status.pools[0].ready (seen: "all")` where its name is
    status. `kind` must have a default for each of its fields; an entry of a list without what it must have is left out
    as a whole."""
    unread: list[str] = []
    data = wire
    while True:
        try:
            return kind.model_validate(data, by_alias=True, by_name=False, extra="ignore"), tuple(unread)
        except ValidationError as error:
            # One at a time: taking out an entry of a list moves those behind it.
            problem = error.errors(include_url=False)[0]
        data = data if unread else copy.deepcopy(wire)
        is_missing = problem["type"] == "missing"
        unread.append(f"{wire_path((name, *problem['loc']))} ({'missing' if is_missing else _seen(problem['input'])})")
        data = _without(data, problem, problem["loc"][:-1] if is_missing else problem["loc"])


def _without(data: object, problem: ErrorDetails, place: Path) -> object:
    """The data without what stands at the place; of what is too long the part that counts stays. All of the data goes
    if there is no such place."""
    if not place:
        return {}
    holder, key = _at(data, place[:-1]), place[-1]
    if isinstance(holder, dict) and isinstance(key, str) and key in holder:
        value = holder[key]
        if problem["type"] == "too_long" and isinstance(value, list):
            # The newest entries come last.
            holder[key] = value[-problem["ctx"]["max_length"] :]
        elif problem["type"] == "string_too_long" and isinstance(value, str):
            holder[key] = value[: problem["ctx"]["max_length"]]
        else:
            del holder[key]
        return data
    if isinstance(holder, list) and isinstance(key, int) and key < len(holder):
        del holder[key]
        return data
    return {}


def _at(data: object, place: Path) -> object:
    """What stands there; None where nothing does."""
    for part in place:
        if isinstance(data, dict) and isinstance(part, str):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _seen(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"seen: {text if len(text) <= _LONGEST_SHOWN else f'{text[:_LONGEST_SHOWN]}...'}"
