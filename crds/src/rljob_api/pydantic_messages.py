"""Converts pydantic's errors into messages of the form *what is wrong (seen: value); how to fix it*."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import get_args

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rljob_api.base import WireModel
from rljob_api.names import similar_names
from rljob_api.quantities import QUANTITY_PATTERN
from rljob_api.scalars import ENDPOINT, HTTP_URL, PATTERN_MESSAGES, QUANTITY_ERROR, URL_WITHOUT_USER, has_user
from rljob_api.v1alpha1.job import RULE_ERROR
from rljob_api.yaml_faults import Path

_MAX_SHOWN_CHARACTERS = 60
_MAX_SHOWN_FIELDS = 3

_TYPES = {
    "int_type": ("must be a whole number", "write digits alone, without quotes, unit or decimals"),
    "int_from_float": ("must be a whole number", "write it without decimals"),
    "float_type": ("must be a number", "write it without quotes or unit"),
    "bool_type": ("must be true or false", "write it without quotes"),
    "string_type": ("must be a string", "put it in quotes"),
    "string_unicode": ("must be a string of valid Unicode", "remove the invalid characters"),
    "tuple_type": ("must be a list", "write each entry with '- ' in front"),
    "list_type": ("must be a list", "write each entry with '- ' in front"),
    "dict_type": ("must be a mapping", "write 'name: value' lines below it"),
    "model_type": ("must be a mapping", "write its fields below it"),
    "model_attributes_type": ("must be a mapping", "write its fields below it"),
    "finite_number": ("must be a finite number", "use a number such as 1.0"),
    "invalid-json-value": ("must be a JSON value", "use strings, numbers, true, false, null, lists and mappings"),
}
"""By type of pydantic's error: what is wrong, and how to fix it."""
_SCALARS = {
    int: "write a plain whole number",
    float: "write a plain number",
    bool: "write true or false",
    str: "put it in quotes",
}
"""By type of a field: what to write instead of a scalar that YAML parsers interpret differently."""
_BOUNDS = {
    "greater_than": ("must be above {}", "gt", "increase it"),
    "greater_than_equal": ("must be at least {}", "ge", "increase it"),
    "less_than": ("must be below {}", "lt", "reduce it"),
    "less_than_equal": ("must be at most {}", "le", "reduce it"),
    "string_too_long": ("must have at most {} characters", "max_length", "shorten it"),
    "string_too_short": ("must have at least {} characters", "min_length", "add the missing characters"),
    "too_long": ("must have at most {} entries", "max_length", "remove some entries"),
    "too_short": ("must have at least {} entry", "min_length", "add an entry"),
    "string_pattern_mismatch": ("must match {}", "pattern", "correct it"),
}
"""By type of pydantic's error: what is wrong, the key of the bound in the error's context, and how to fix it."""
_NAMES = {
    "persistentVolumeClaim": "a PersistentVolumeClaim",
    "claimName": "a PersistentVolumeClaim",
    "configMap": "a ConfigMap",
}
"""Fields whose value is the name of a Kubernetes object, and the kind of this object."""


def plain_message(error: ErrorDetails, root: type[WireModel]) -> str:
    """The message for one error. `root` is the type that was validated."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == RULE_ERROR:
        seen = error["input"]
        return f"{context['wrong']}{f' (seen: {seen})' if seen is not None else ''}; {context['advice']}"
    if kind == "missing":
        values = _values_of(error["loc"], root)
        return f"is required but missing; add it{f', with one of {values}' if values else ''}"
    if kind == "extra_forbidden":
        return _unknown_field(error["loc"], root)
    seen = _seen(error["input"])
    if kind in ("enum", "literal_error"):
        choices = _choices(context)
        wrong = f"must be one of {choices}" if "," in choices else f"must be {choices}"
        advice = _nearest_choice(error["input"], context)
        if error["input"] == "" and (info := _field_at(error["loc"], root)) is not None and not info.is_required():
            advice += ", or remove the field"
        return f"{wrong} (seen: {seen}); {advice}"
    if kind in ("string_too_short", "string_pattern_mismatch") and error["input"] == "":
        return f"must not be empty (seen: {seen}); {_how_to_fill(error['loc'], root)}"
    if kind == "string_type" and isinstance(error["input"], dict | list | tuple):
        return f"must be a string (seen: {seen}); use a single value"
    pattern = QUANTITY_PATTERN if kind == QUANTITY_ERROR else context.get("pattern")
    if pattern in PATTERN_MESSAGES:
        wrong, advice = PATTERN_MESSAGES[pattern]
        # A URL with a user may have a password, which no message may show.
        if pattern == URL_WITHOUT_USER:
            return f"{wrong}; {advice}"
        if pattern in (HTTP_URL, ENDPOINT) and has_user(str(error["input"])):
            return (
                f"{PATTERN_MESSAGES[URL_WITHOUT_USER][0]}; put them into a Secret, which a reward's keyVariable and a"
                " bucket's secret name"
            )
        return f"{wrong} (seen: {seen}); {advice}"
    if kind == "too_short" and context["min_length"] > 1:
        return f"must have at least {context['min_length']} entries (seen: {seen}); add entries"
    if kind in _BOUNDS:
        text, name, advice = _BOUNDS[kind]
        return f"{text.format(_bound(context[name]))} (seen: {seen}); {advice}"
    wrong, advice = _TYPES.get(kind, (_without_jargon(error["msg"]), "correct it"))
    if kind in ("model_type", "model_attributes_type"):
        advice += _fields_of(error["loc"], root)
    return f"{wrong} (seen: {seen}); {advice}"


def advice_for_scalar(loc: Path, root: type[WireModel]) -> str:
    """What to write at a wire path instead of a plain scalar that YAML parsers interpret differently."""
    info = _field_at(loc, root)
    while info is None and loc and (isinstance(loc[-1], int) or model_at(root, loc[:-1]) is None):
        # An entry of a list or map: the field around it has the type.
        loc = loc[:-1]
        info = _field_at(loc, root)
    kinds = set(_plain_types(info.annotation)) if info is not None else set()
    if len(kinds) != 1:
        return "put it in quotes if it is a string, else write true, false, or a plain decimal number"
    [kind] = kinds
    if issubclass(kind, Enum):
        return f"write one of {', '.join(str(choice.value) for choice in kind)}"
    if issubclass(kind, WireModel):
        return _TYPES["model_type"][1]
    return _SCALARS[kind]


def _plain_types(annotation: object) -> Iterable[type]:
    """The types of scalars and blocks in an annotation such as `tuple[Pool, ...]` or `int | None`."""
    if isinstance(annotation, type) and (annotation in _SCALARS or issubclass(annotation, Enum | WireModel)):
        yield annotation
    for argument in get_args(annotation):
        yield from _plain_types(argument)


def follows_from_another(error: ErrorDetails) -> bool:
    """Whether the error only follows from another one: pydantic does not count the invalid entries of a list, so it may
    report the list as too short."""
    value = error["input"]
    return error["type"] == "too_short" and isinstance(value, list | tuple) and len(value) >= error["ctx"]["min_length"]


def model_at(root: type[WireModel], path: Path) -> type[WireModel] | None:
    """The contract type of the value at a wire path; None if that value has no fields."""
    current: type[WireModel] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        if current is None:
            return None
        annotations = [info.annotation for info in current.model_fields.values() if info.alias == part]
        current = next((model for each in annotations for model in _models_in(each)), None)
    return current


def _models_in(annotation: object) -> Iterable[type[WireModel]]:
    """The contract types in an annotation such as `tuple[Pool, ...]` or `Code | None`."""
    if isinstance(annotation, type) and issubclass(annotation, WireModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _unknown_field(loc: Path, root: type[WireModel]) -> str:
    model = model_at(root, loc[:-1])
    known = sorted(info.alias or name for name, info in model.model_fields.items()) if model is not None else []
    name = str(loc[-1])
    if near := similar_names(name, known):
        return f"is not a known field; did you mean {near[0]}?"
    if not known:
        return "is not a known field; remove it"
    return f"is not a known field; known fields are {', '.join(known)}"


def _fields_of(loc: Path, root: type[WireModel]) -> str:
    """The required fields of the block at a wire path, or else the first of its fields, as text: ` (type, source)`."""
    model = model_at(root, loc)
    if model is None:
        return ""
    infos = [(info.alias or name, info.is_required()) for name, info in model.model_fields.items()]
    names = [name for name, is_required in infos if is_required] or [name for name, _ in infos][:_MAX_SHOWN_FIELDS]
    return f" ({', '.join(names)}{', ...' if len(names) < len(infos) else ''})"


def _field_at(loc: Path, root: type[WireModel]) -> FieldInfo | None:
    """The field of the contract at a wire path; None if there is none, for example for an entry of a list or map."""
    model = model_at(root, loc[:-1]) if loc else None
    fields = model.model_fields.values() if model is not None else ()
    return next((info for info in fields if info.alias == loc[-1]), None)


def _values_of(loc: Path, root: type[WireModel]) -> str:
    """The values that an enum field may have, as text such as `Fail, Drop`; empty for any other field."""
    info = _field_at(loc, root)
    annotation = info.annotation if info is not None else None
    if not (isinstance(annotation, type) and issubclass(annotation, Enum)):
        return ""
    return ", ".join(str(choice.value) for choice in annotation)


def _how_to_fill(loc: Path, root: type[WireModel]) -> str:
    """Advice for a field with an empty string."""
    info = _field_at(loc, root)
    value = f"the name of {_NAMES[str(loc[-1])]}" if loc and loc[-1] in _NAMES else "a value"
    return f"set {value}" if info is None or info.is_required() else f"set {value}, or remove the field"


def _bound(value: object) -> object:
    """The bound as it is shown: 1 for 1.0, because bounds of float fields are floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _choices(context: Mapping[str, object]) -> str:
    """The allowed values, such as `Fail, Drop`."""
    return str(context["expected"]).replace("'", "").replace(" or ", ", ")


def _nearest_choice(value: object, context: Mapping[str, object]) -> str:
    choices = _choices(context).split(", ")
    if len(choices) == 1:
        return f"write {choices[0]}"
    near = similar_names(str(value), choices)
    return f"did you mean {near[0]}?" if near else "choose one of them"


def _seen(value: object) -> str:
    """The value for a message: JSON, cut after `_MAX_SHOWN_CHARACTERS`; of a mapping or list only the kind and
    length. A URL with a user may have a password, so it is not shown."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list with {len(value)} entr{'y' if len(value) == 1 else 'ies'}" if value else "an empty list"
    plain = value.value if isinstance(value, Enum) else value
    if isinstance(plain, str) and has_user(plain):
        return "a URL with a user"
    text = json.dumps(plain, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."


def _without_jargon(message: str) -> str:
    """pydantic's own message without the words with which it begins."""
    for start in ("Input should be ", "Value error, ", "Assertion failed, "):
        if message.startswith(start):
            return ("must be " if start.startswith("Input") else "") + message.removeprefix(start)
    return message
