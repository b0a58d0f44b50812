"""The one reader of documents that a program of another version may have written.

Such a document may have fields that are unknown here, at any depth, and values that cannot be read here. What is done
with these, the policy of the document says; all policies stand here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.base import WireModel
from rljob_api.pydantic_messages import is_echo
from rljob_api.yaml_text import Path, wire_path

ModelT = TypeVar("ModelT", bound=WireModel)


@dataclass(frozen=True)
class Policy:
    """What is done with the parts of a document that this version does not know, or cannot read."""

    refuses_unknown_fields: bool = False
    """Whether a field that is unknown here and not empty is an error. Otherwise it is left out, and named."""
    may_be_unknown_below: Path = ()
    """A place below which unknown fields are left out even so."""
    optional_fields: tuple[str, ...] = ()
    """Fields that are left out as a whole if something in them cannot be read."""
    leaves_out_unreadable_parts: bool = False
    """Whether the smallest part that cannot be read is left out, and named, until the rest can be. What is too long is
    cut: a text at its end, a list at its beginning, because the newest entries come last. For types with a default for
    each of their fields."""


TRAINER_JOB = Policy(refuses_unknown_fields=True, may_be_unknown_below=("spec", "runPolicy"))
"""A field that the trainer does not know would change the training if it did. The run policy is the operator's."""
RUN_STATE = Policy()
"""What tells of a run is read, whatever else it says."""
CHECKPOINT = Policy()
"""Of manifests, and what else lies beside the tensors: these can be loaded without what is unknown."""
STORED_SPEC = Policy()
"""Of an RLJob. The API server has filled in the defaults of its own definition, which may have more fields."""
STATUS = Policy(
    optional_fields=("phase", "reason", "gpus", "conditions", "pools", "progress", "checkpoint", "exportUri")
)
"""As the operator reads it. Unknown fields stay on the API server, because the operator writes only what has changed;
but a list that has changed is written whole, without the unknown fields of its entries, such as those of an attempt.
The optional fields are for people, and are written anew."""
AS_FAR_AS_READABLE = Policy(leaves_out_unreadable_parts=True)
"""Of what is only shown, and of deadlines in a spec that cannot be read."""


@dataclass(frozen=True)
class Reading(Generic[ModelT]):
    """What could be read of a document."""

    value: ModelT
    unknown_fields: tuple[str, ...]
    """Places of unknown fields that were left out, such as `spec.pools[0].foo`."""
    unreadable_parts: tuple[ErrorDetails, ...]
    """Why other parts were left out or cut; each with its place when those before it were gone."""


def read_document(kind: type[ModelT], document: object, policy: Policy) -> Reading[ModelT]:
    """Reads parsed JSON, which is not changed. What is known is checked as by `WireModel.from_wire`. Rules between
    fields are checked when all unknown fields are out, for they are checked on values only.

    Raises pydantic.ValidationError.
    """
    unknown_fields: dict[str, None] = {}
    unreadable_parts: list[ErrorDetails] = []
    rest = document
    while True:
        try:
            return Reading(kind.from_wire(rest), tuple(unknown_fields), tuple(unreadable_parts))
        except ValidationError as error:
            # A copy costs half as much as the reading, and nearly always there is nothing to take out.
            rest = copy.deepcopy(document) if rest is document else rest
            errors = [each for each in error.errors(include_url=False) if not is_echo(each)]
            places = [each["loc"] for each in errors if _is_left_out(each, policy) and _take_out(rest, each["loc"])]
            unknown_fields |= dict.fromkeys(map(wire_path, places))
            if not places:
                # One at a time: without an entry of a list, those behind it have other places.
                rest = _without_unreadable(rest, errors[0], policy)
                if rest is None:
                    raise
                unreadable_parts.append(errors[0])


def _is_left_out(error: ErrorDetails, policy: Policy) -> bool:
    if error["type"] != "extra_forbidden":
        return False
    value, above = error["input"], policy.may_be_unknown_below
    is_empty = value is None or (isinstance(value, dict | list | str) and not value)
    is_below = above != () and error["loc"][: len(above)] == above
    return is_empty or is_below or not policy.refuses_unknown_fields


def _without_unreadable(document: object, error: ErrorDetails, policy: Policy) -> object:
    """The document without what cannot be read; None if that has to be there."""
    place, field = error["loc"], error["loc"][:1]
    if field and field[0] in policy.optional_fields:
        return document if _take_out(document, field) else None
    if not policy.leaves_out_unreadable_parts or document == {}:
        return None
    holder, value = _at(document, place[:-1]), _at(document, place)
    if error["type"] in ("too_long", "string_too_long") and isinstance(holder, dict) and isinstance(value, str | list):
        limit = error["ctx"]["max_length"]
        holder[place[-1]] = value[:limit] if isinstance(value, str) else value[-limit:]
        return document
    return document if _take_out(document, place[:-1] if error["type"] == "missing" else place) else {}


def _take_out(document: object, place: Path) -> bool:
    """Takes a field, or an entry of a list, out of a document; False if there is none."""
    if not place:
        return False
    holder, key = _at(document, place[:-1]), place[-1]
    if isinstance(holder, dict) and key in holder:
        del holder[key]
        return True
    if isinstance(holder, list) and isinstance(key, int) and key < len(holder):
        del holder[key]
        return True
    return False


def _at(document: object, place: Path) -> object:
    """What stands there; None if nothing does."""
    for part in place:
        if isinstance(document, dict):
            document = document.get(part)
        elif isinstance(document, list) and isinstance(part, int) and part < len(document):
            document = document[part]
        else:
            return None
    return document
