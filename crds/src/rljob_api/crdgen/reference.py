"""Generates docs/spec-reference.md: every type of spec and status with its fields, defaults, bounds and rules."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise

from rljob_api.crdgen.structural import Schema, mapping
from rljob_api.scalars import MAX_COUNT
from rljob_api.v1alpha1.algorithm import Algorithm, AlgorithmType
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_api.v1alpha1.rules import MUTABLE_SPEC_FIELDS, RULES
from rljob_api.v1alpha1.spec import MAX_NAME_LENGTH, RLJobSpec

_REFERENCE = "#/$defs/"
_ROOTS = ("RLJobSpec", "RLJobStatus")
_TYPES = "rljob_api.v1alpha1."
_HEADER = """\
<!-- Generated from the types in rljob_api by `python -m rljob_api.crdgen`; do not edit. -->
# Reference of `rljob.dev/v1alpha1`, kind `RLJob`

A job has `apiVersion: rljob.dev/v1alpha1`, `kind: RLJob`, `metadata.name` (at most {name_length} lower case letters,
digits and '-', with a letter at the start and a letter or digit at the end), and `spec` ([RLJobSpec](#rljobspec)). The
operator writes `status` ([RLJobStatus](#rljobstatus)). `rljob` and `kubectl` reject unknown fields. For other clients
the API server removes them with a warning, unless the request asks for strict field validation. Numbers, except
quantities, must not be in quotes. An explicit `null` is the same as an unset field.

The spec is immutable after creation, except {mutable}.
"""


def reference_text() -> str:
    """The whole page as Markdown."""
    definitions = mapping(RLJob.model_json_schema(by_alias=True)["$defs"])
    mutable = ", ".join(f"`{RLJobSpec.model_fields[name].alias}`" for name in MUTABLE_SPEC_FIELDS)
    parts = [_HEADER.format(mutable=mutable, name_length=MAX_NAME_LENGTH)]
    for name in _reachable(definitions):
        parts.append("\n".join(_section(name, definitions)))
    return "\n".join(parts)


def _reachable(definitions: Schema) -> list[str]:
    """Names of all types below spec and status, in the order of their first occurrence."""
    found: dict[str, None] = {}
    waiting = list(_ROOTS)
    while waiting:
        name = waiting.pop(0)
        if name not in found and name != "JsonValue":
            found[name] = None
            waiting = [*dict.fromkeys(_references(definitions[name])), *waiting]
    return list(found)


def _references(schema: object) -> Iterator[str]:
    """Names of the types that a schema refers to, in its order."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref":
                yield str(value).removeprefix(_REFERENCE)
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _section(name: str, definitions: Schema) -> Iterator[str]:
    schema = mapping(definitions[name])
    yield f"## {name}"
    yield str(schema.get("description", ""))
    yield ""
    if "enum" in schema:
        yield from _values(name, [str(value) for value in _items(schema["enum"])])
        yield ""
        if name == AlgorithmType.__name__:
            yield from _recipes()
        return
    yield "| field | type | default | description |"
    yield "|---|---|---|---|"
    required = _items(schema.get("required", []))
    for field, value in mapping(schema.get("properties", {})).items():
        info = mapping(value)
        cells = (f"`{field}`", _type(info), _default(info, field in required), _description(info, definitions))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
    rules = [rule for rule in RULES if rule.on.__name__ == name]
    if rules:
        yield "Rules, with the message when one is broken:"
        yield ""
        yield from (f"- {f'`{rule.field[1:]}`: ' if rule.field else ''}{rule.message}" for rule in rules)
        yield ""


def _values(name: str, values: list[str]) -> Iterator[str]:
    """The values of an enum, each with the docstring that follows it in the source, if any has one."""
    [choice] = [
        each for each in StrEnum.__subclasses__() if each.__name__ == name and each.__module__.startswith(_TYPES)
    ]
    texts = _member_texts(choice)
    if texts:
        yield from (f"- `{value}`" + (f": {texts[value]}" if value in texts else "") for value in values)
    else:
        yield "One of " + ", ".join(f"`{value}`" for value in values) + "."


def _member_texts(choice: type[StrEnum]) -> dict[str, str]:
    """Docstrings of an enum's members by value, from the source, because Python does not keep docstrings of members."""
    [definition] = ast.parse(inspect.getsource(choice)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for member, text in pairwise(definition.body):
        match member, text:
            case ast.Assign(value=ast.Constant(value=value)), ast.Expr(value=ast.Constant(value=str(words))):
                texts[str(value)] = " ".join(words.split())
    return texts


def _recipes() -> Iterator[str]:
    """A table with the values that each recipe sets for unset fields."""
    unresolved = Algorithm().to_full_wire()
    resolved = [resolve_algorithm(Algorithm(type=each)).to_full_wire() for each in AlgorithmType]
    columns = [dict(_leaves({k: v for k, v in wire.items() if unresolved.get(k) in (None, {})})) for wire in resolved]
    yield "| value of an unset field | " + " | ".join(f"`{each}`" for each in AlgorithmType) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for field in dict.fromkeys(field for column in columns for field in column):
        yield f"| `{field}` | " + " | ".join(column.get(field, "") for column in columns) + " |"
    yield ""


def _leaves(wire: Schema, path: str = "") -> Iterator[tuple[str, str]]:
    """Path (`a.b`) and JSON value of each scalar or list in a wire form."""
    for name, value in wire.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", f"`{json.dumps(value)}`"


def _type(schema: Schema) -> str:
    """A short name of a field's type with its bounds."""
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(_REFERENCE)
        return "any JSON" if name == "JsonValue" else f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        variants = [mapping(variant) for variant in _items(schema["anyOf"])]
        return _type(next(variant for variant in variants if variant.get("type") != "null"))
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type(mapping(schema['items']))}{_limit(schema, 'maxItems', 'entries')}"
    if kind == "object":
        values = mapping(schema["additionalProperties"])
        return f"map of {_type(values)}{_limit(schema, 'maxProperties', 'entries')}"
    if kind == "string":
        return "string" + _limit(schema, "maxLength", "characters")
    if kind in ("integer", "number"):
        return {"integer": "whole number", "number": "number"}[str(kind)] + _number_bounds(schema)
    return "true or false"


def _limit(schema: Schema, key: str, unit: str) -> str:
    return f", at most {schema[key]} {unit}" if key in schema else ""


def _number_bounds(schema: Schema) -> str:
    words = (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"), ("exclusiveMaximum", "below"))
    shown = [f"{word} {schema[key]:g}" for key, word in words if key in schema and schema[key] != MAX_COUNT]
    return f", {' '.join(shown)}" if shown else ""


def _default(schema: Schema, required: bool) -> str:
    if required:
        return "required"
    if "default" not in schema:
        return "defaults of its fields" if "$ref" in schema else "empty"
    return "unset" if schema["default"] is None else f"`{json.dumps(schema['default'], ensure_ascii=False)}`"


def _description(info: Schema, definitions: Schema) -> str:
    """The field's own description, else that of its type or of its entries' type."""
    text = info.get("description")
    types = [mapping(definitions[name]).get("description", "") for name in _references(info) if name != "JsonValue"]
    return " ".join(str(text or " ".join(map(str, types))).split())


def _items(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
