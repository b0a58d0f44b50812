"""Reads documents that a program of another version may have written.

Such a document may have unknown fields, at any depth, and unreadable values. Each kind of document has a policy, which
defines how they are treated. All policies are in this module.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.base import WireModel
from rljob_api.pydantic_messages import follows_from_another
from rljob_api.yaml_faults import Path
from rljob_api.yaml_text import wire_path

ModelT = TypeVar("ModelT", bound=WireModel)


@dataclass(frozen=True)
class Policy:
    """How unknown fields and unreadable values of a document are treated."""

    rejects_unknown_fields: bool = False
    """Whether an unknown field that is not empty is an error. If false, unknown fields are removed and listed in
    `Reading.unknown_fields`. Empty ones are always removed and listed."""
    ignores_unknown_below: Path = ()
    """Path below which unknown fields are removed even if `rejects_unknown_fields` is true."""
    optional_fields: tuple[str, ...] = ()
    """Top-level fields each of which is removed entirely if a part of it cannot be read."""
    removes_unreadable_parts: bool = False
    """Whether unreadable parts, as small as possible, are removed and listed in `Reading.unreadable_parts` until the
    rest can be read. Strings that are too long lose their end. Lists that are too long lose their first entries,
    because the newest entries come last. Only for types whose fields all have a default."""


TRAINER_JOB = Policy(rejects_unknown_fields=True, ignores_unknown_below=("spec", "runPolicy"))
"""For the job that the trainer reads. An unknown field could change the training, so it is an error. Fields of the run
policy cannot change the training, because the operator applies them."""
RUN_STATE = Policy(optional_fields=("alarms",))
"""For the run state: unknown fields are ignored. Alarms are only for people, so unreadable ones do not make the state
unreadable."""
CHECKPOINT = Policy()
"""For manifests and other files of a checkpoint: unknown fields are ignored, because loading the tensors does not need
them."""
STORED_SPEC = Policy()
"""For the spec of a stored RLJob: unknown fields are ignored. The API server fills in the defaults of its CRD, which
may be newer than the reader and have more fields."""
STATUS = Policy(
    optional_fields=(
        *("phase", "reason", "gpus", "conditions", "pools", "progress", "checkpoint", "exportUri", "alarms", "pods"),
    )
)
"""For the status that the operator reads. The operator writes only changed fields, so unknown fields stay on the API
server. It writes a changed list (such as `attempts`) as a whole, so unknown fields of the list's entries get lost. The
optional fields are for people, and the operator writes them again."""
AS_FAR_AS_READABLE = Policy(removes_unreadable_parts=True)
"""For documents that are only displayed, and for the deadlines of an unreadable spec."""


@dataclass(frozen=True)
class Reading(Generic[ModelT]):
    """The readable part of a document."""

    value: ModelT
    unknown_fields: tuple[str, ...]
    """Paths of unknown fields that were removed, such as `spec.pools[0].foo`."""
    unreadable_parts: tuple[ErrorDetails, ...]
    """The errors because of which other parts were removed or cut. The path of an error is the path in the document
    without the parts that were removed before."""


def read_document(kind: type[ModelT], document: object, policy: Policy) -> Reading[ModelT]:
    """Reads parsed JSON by a policy; does not modify `document`.

    Known fields are validated as by `WireModel.from_wire`. Rules between fields are checked after all unknown fields
    are removed. Raises pydantic.ValidationError for errors that the policy does not allow to remove.
    """
    unknown_fields: dict[str, None] = {}
    unreadable_parts: list[ErrorDetails] = []
    rest = document
    while True:
        try:
            return Reading(kind.from_wire(rest), tuple(unknown_fields), tuple(unreadable_parts))
        except ValidationError as error:
            # A copy takes half as long as the validation, and is rarely needed: most documents are valid.
            rest = copy.deepcopy(document) if rest is document else rest
            errors = [each for each in error.errors(include_url=False) if not follows_from_another(each)]
            removed = [each["loc"] for each in errors if _may_remove_field(each, policy) and _remove(rest, each["loc"])]
            unknown_fields |= dict.fromkeys(map(wire_path, removed))
            if not removed:
                # One part at a time: the removal of a list's entry changes the paths of the entries after it.
                rest = _without_unreadable(rest, errors[0], policy)
                if rest is None:
                    raise
                unreadable_parts.append(errors[0])


def _may_remove_field(error: ErrorDetails, policy: Policy) -> bool:
    """Whether the error is an unknown field that the policy allows to remove."""
    if error["type"] != "extra_forbidden":
        return False
    value, above = error["input"], policy.ignores_unknown_below
    is_empty = value is None or (isinstance(value, dict | list | str) and not value)
    is_below = above != () and error["loc"][: len(above)] == above
    return is_empty or is_below or not policy.rejects_unknown_fields


def _without_unreadable(document: object, error: ErrorDetails, policy: Policy) -> object:
    """The document, changed in place, without the part that the error is about; `{}` if that part cannot be removed;
    None if the policy does not allow its removal."""
    path, field = error["loc"], error["loc"][:1]
    if field and field[0] in policy.optional_fields:
        return document if _remove(document, field) else None
    if not policy.removes_unreadable_parts or document == {}:
        return None
    parent, value = _value_at(document, path[:-1]), _value_at(document, path)
    if error["type"] in ("too_long", "string_too_long") and isinstance(parent, dict) and isinstance(value, str | list):
        limit = error["ctx"]["max_length"]
        parent[path[-1]] = value[:limit] if isinstance(value, str) else value[-limit:]
        return document
    return document if _remove(document, path[:-1] if error["type"] == "missing" else path) else {}


def _remove(document: object, path: Path) -> bool:
    """Removes a field or a list's entry from a document; False if it does not exist."""
    if not path:
        return False
    parent, key = _value_at(document, path[:-1]), path[-1]
    if isinstance(parent, dict) and key in parent:
        del parent[key]
        return True
    if isinstance(parent, list) and isinstance(key, int) and key < len(parent):
        del parent[key]
        return True
    return False


def _value_at(document: object, path: Path) -> object:
    """The value at a path; None if there is none."""
    for part in path:
        if isinstance(document, dict):
            document = document.get(part)
        elif isinstance(document, list) and isinstance(part, int) and part < len(document):
            document = document[part]
        else:
            return None
    return document
