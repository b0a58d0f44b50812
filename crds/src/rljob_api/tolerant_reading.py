"""Reads documents that a program of another version may have written.

Such a document may have unknown fields, at any depth, and unreadable values. The policy of the document defines how
they are treated; all policies are in this module.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.base import WireModel
from rljob_api.pydantic_messages import follows_from_another
from rljob_api.yaml_text import Path, wire_path

ModelT = TypeVar("ModelT", bound=WireModel)


@dataclass(frozen=True)
class Policy:
    """How unknown fields and unreadable values of a document are treated."""

    rejects_unknown_fields: bool = False
    """Whether an unknown, non-empty field is an error. If not, it is removed and listed in `Reading.unknown_fields`."""
    ignores_unknown_below: Path = ()
    """Path below which unknown fields are removed even if `rejects_unknown_fields` is true."""
    optional_fields: tuple[str, ...] = ()
    """Top-level fields that are removed entirely if a part of them cannot be read."""
    removes_unreadable_parts: bool = False
    """Whether unreadable parts, as small as possible, are removed and listed until the rest can be read. Too long
    strings are cut at the end, too long lists at the start, because the newest entries come last. Only for types whose
    fields all have a default."""


TRAINER_JOB = Policy(rejects_unknown_fields=True, ignores_unknown_below=("spec", "runPolicy"))
"""For the job of a trainer. To ignore an unknown field would change the training, except in the run policy, which the
operator applies."""
RUN_STATE = Policy()
"""For the run state: unknown fields are ignored."""
CHECKPOINT = Policy()
"""For manifests and other files of a checkpoint: unknown fields are ignored, because loading the tensors does not need
them."""
STORED_SPEC = Policy()
"""For the spec of a stored RLJob. The API server fills in defaults of its own CRD, which may have more fields."""
STATUS = Policy(
    optional_fields=("phase", "reason", "gpus", "conditions", "pools", "progress", "checkpoint", "exportUri")
)
"""For the status that the operator reads. The operator writes only changed fields, so unknown fields stay on the API
server. A changed list is written as a whole, without unknown fields of its entries, such as those of an attempt. The
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
    """Why other parts were removed or cut. Each path is that after the removal of the previous parts."""


def read_document(kind: type[ModelT], document: object, policy: Policy) -> Reading[ModelT]:
    """Reads parsed JSON by a policy; does not modify `document`.

    Known fields are validated as by `WireModel.from_wire`. Rules between fields are checked after all unknown fields
    are removed. Raises pydantic.ValidationError.
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
            places = [each["loc"] for each in errors if _is_removed(each, policy) and _remove(rest, each["loc"])]
            unknown_fields |= dict.fromkeys(map(wire_path, places))
            if not places:
                # One part at a time: the removal of a list's entry changes the paths of the entries after it.
                rest = _without_unreadable(rest, errors[0], policy)
                if rest is None:
                    raise
                unreadable_parts.append(errors[0])


def _is_removed(error: ErrorDetails, policy: Policy) -> bool:
    if error["type"] != "extra_forbidden":
        return False
    value, above = error["input"], policy.ignores_unknown_below
    is_empty = value is None or (isinstance(value, dict | list | str) and not value)
    is_below = above != () and error["loc"][: len(above)] == above
    return is_empty or is_below or not policy.rejects_unknown_fields


def _without_unreadable(document: object, error: ErrorDetails, policy: Policy) -> object:
    """The document without its unreadable part; None if the policy does not allow its removal."""
    place, field = error["loc"], error["loc"][:1]
    if field and field[0] in policy.optional_fields:
        return document if _remove(document, field) else None
    if not policy.removes_unreadable_parts or document == {}:
        return None
    holder, value = _value_at(document, place[:-1]), _value_at(document, place)
    if error["type"] in ("too_long", "string_too_long") and isinstance(holder, dict) and isinstance(value, str | list):
        limit = error["ctx"]["max_length"]
        holder[place[-1]] = value[:limit] if isinstance(value, str) else value[-limit:]
        return document
    return document if _remove(document, place[:-1] if error["type"] == "missing" else place) else {}


def _remove(document: object, place: Path) -> bool:
    """Removes a field or a list's entry from a document; False if it does not exist."""
    if not place:
        return False
    holder, key = _value_at(document, place[:-1]), place[-1]
    if isinstance(holder, dict) and key in holder:
        del holder[key]
        return True
    if isinstance(holder, list) and isinstance(key, int) and key < len(holder):
        del holder[key]
        return True
    return False


def _value_at(document: object, place: Path) -> object:
    """The value at a path; None if there is none."""
    for part in place:
        if isinstance(document, dict):
            document = document.get(part)
        elif isinstance(document, list) and isinstance(part, int) and part < len(document):
            document = document[part]
        else:
            return None
    return document
