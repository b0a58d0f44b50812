"""Converts pydantic's JSON schema into a structural schema, the subset of JSON schema that a CRD may use.

References are expanded, `X | None` becomes X, number bounds get their OpenAPI 3.0 form, maps with values of any JSON
type keep all fields, and each occurrence of a type gets the rules of the type. The size of a CRD is limited. So the CRD
has only the first paragraph of each description, no descriptions within the types of `_WITHOUT_INNER_DESCRIPTIONS`
and within the fields of `_DESCRIBED_AT`, and nothing within the fields of `_UNCHECKED`. The reference page has all
descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.rule import cel_property, wire_name
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.rules import MUTABLE_SPEC_FIELDS, RULES, immutable_fields
from rljob_api.v1alpha1.spec import Metadata, RLJobSpec

Schema = dict[str, object]

_COPIED = (
    *("type", "format", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "maxProperties", "required", "x-kubernetes-int-or-string"),
)
_LISTS_BY_NAME = ("Pool", "EnvVar", "Volume", "Reward", "PoolStatus", "Condition")
_LIST_KEYS = {"Condition": "type"}
"""Lists of these types are maps for Kubernetes, so that server-side apply merges their entries. The key of an entry is
its `name`, that of a condition its `type`."""
_WITHOUT_INNER_DESCRIPTIONS = ("Affinity", "Attempt", "Counters", "NextAttempt", "HandledRequests")
"""Types whose fields have no descriptions in the CRD: an affinity occurs many times, and the fields of the others are
the operator's own records."""
_DESCRIBED_AT = {
    ("Head", "resources"): "spec.pools.resources",
    ("Head", "template"): "spec.pools.template",
    ("Roles", "ref"): "spec.roles.actor",
    ("RefRole", "model"): "spec.training.model",
    ("Roles", "critic"): "spec.roles.actor",
    ("Roles", "rewardModel"): "spec.roles.actor",
    ("EnvSource", "configMapKeyRef"): "spec.env.valueFrom.secretKeyRef",
    ("EnvFrom", "configMapRef"): "spec.envFrom.secretRef",
    ("Critic", "optimizer"): "spec.training.optimizer",
    ("CriticModel", "offload"): "spec.training.model.offload",
    ("Evaluation", "dataset"): "spec.training.dataset",
}
"""Fields, by type and name, without descriptions within them, and the path of a field whose type has the same fields.
Paths as in `kubectl explain rljob.spec.pools`."""
_UNCHECKED = (("Head", "template", "affinity"),)
"""Fields whose content the CRD does not describe, each a type and a path within it. An affinity takes 15 KB, and few
jobs have one on the head. The API server stores what is written there; `rljob` and the operator check it."""
_REFERENCE_TEXT = " The fields are described at "


class UnknownSchemaError(TypeError):
    """A type uses a form of JSON schema that a CRD does not support."""


def root_schema() -> Schema:
    """The structural schema of a whole RLJob, ready for `openAPIV3Schema`."""
    document = RLJob.model_json_schema(by_alias=True)
    definitions = mapping(document["$defs"])
    converter = _Converter(definitions)
    root = mapping(converter.definition("RLJob", document))
    properties = mapping(root["properties"])
    properties["apiVersion"] = {"type": "string"}
    properties["kind"] = {"type": "string"}
    properties["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
    root["required"] = ["spec"]
    root["x-kubernetes-validations"] = [
        _validation(rule.cel, rule.message, f".metadata{rule.field}") for rule in RULES if rule.on is Metadata
    ]
    return root


def mapping(value: object) -> Schema:
    """The value, which must be a mapping; parsed JSON has no static types."""
    if not isinstance(value, dict):
        raise UnknownSchemaError(f"schema: must be a mapping (seen: {value!r}); change the type")
    return value


def _rules_of(name: str) -> list[Schema]:
    """The `x-kubernetes-validations` of one type."""
    rules = [_validation(rule.cel, rule.message, rule.field) for rule in RULES if rule.on.__name__ == name]
    if name == RLJobSpec.__name__:
        rules = [_checked_at_creation(rule) for rule in rules]
        rules += [_validation(each.cel, each.message, each.field) for each in immutable_fields()]
    return rules


def _validation(cel: str, message: str, field: str) -> Schema:
    """One entry of `x-kubernetes-validations`."""
    validation: Schema = {"rule": cel, "message": message}
    return validation | {"fieldPath": field} if field else validation


def _checked_at_creation(rule: Schema) -> Schema:
    """A rule of the spec that the API server evaluates only when the job is created, if it reads only immutable fields.

    The API server evaluates all rules again at every write of the status. The rules of the spec are the most expensive
    ones. This also lets a user suspend a job that breaks a rule of a newer version.
    """
    mutable = (f"self.{cel_property(wire_name(RLJobSpec, name))}" for name in MUTABLE_SPEC_FIELDS)
    if any(field in str(rule["rule"]) for field in mutable):
        return rule
    return rule | {"rule": f"oldSelf.hasValue() || ({rule['rule']})", "optionalOldSelf": True}


def _first_paragraph(text: object) -> str:
    return " ".join(str(text).split("\n\n")[0].split())


@dataclass(frozen=True)
class _Converter:
    """Converts schemas with references to `definitions`, the `$defs` of pydantic's schema."""

    definitions: Mapping[str, object]

    def definition(self, name: str, schema: Schema) -> Schema:
        """The schema of a named type: an enum, or an object with its rules."""
        result = self.convert(schema)
        if name in _WITHOUT_INNER_DESCRIPTIONS:
            result["properties"] = _without_descriptions(result["properties"])
        for (owner, field), other in _DESCRIBED_AT.items():
            if owner == name:
                described = mapping(mapping(result["properties"])[field])
                described["properties"] = _without_descriptions(described["properties"])
                described["description"] = f"{described['description']}{_REFERENCE_TEXT}{other}."
        for owner, *path in _UNCHECKED:
            if owner == name:
                _leave_unchecked(result, path)
        rules = _rules_of(name)
        if rules:
            result["x-kubernetes-validations"] = rules
        return result

    def convert(self, schema: Schema) -> Schema:
        """The schema without references, unions with null, and keywords that a CRD does not support."""
        if "$ref" in schema:
            return self._reference(schema)
        if "anyOf" in schema:
            return self._optional(schema)
        result: Schema = {}
        if "description" in schema:
            result["description"] = _first_paragraph(schema["description"])
        result |= {key: schema[key] for key in _COPIED if key in schema}
        if "x-kubernetes-int-or-string" in result:
            del result["type"]
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if exclusive in schema:
                result |= {bound: schema[exclusive], exclusive: True}
        least = schema.get("minimum")
        if isinstance(least, float) and not least.is_integer():
            # For a value without decimals the API server rounds this minimum towards 0, so that 0 passes.
            result["x-kubernetes-validations"] = [
                {"rule": f"self >= {least}", "message": f"must be at least {least}; increase it"}
            ]
        if schema.get("default") is not None:
            result["default"] = schema["default"]
        if schema.get("type") == "array":
            result |= self._list(mapping(schema["items"]))
        elif schema.get("type") == "object":
            result |= self._object(schema)
        elif "type" not in schema and "const" not in schema:
            raise UnknownSchemaError(f"schema: must have a type or a reference (seen: {schema!r}); change the type")
        return result

    def _reference(self, schema: Schema) -> Schema:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        result = self.definition(name, mapping(self.definitions[name]))
        for key in ("description", "default"):
            if schema.get(key) is not None:
                result[key] = schema[key]
        if "description" in result:
            result["description"] = _first_paragraph(result["description"])
        return result

    def _optional(self, schema: Schema) -> Schema:
        """The schema of `X | None` with the default None: that of X, because the API server removes explicit nulls."""
        variants = [mapping(variant) for variant in _items(schema["anyOf"])]
        kinds = [variant for variant in variants if variant.get("type") != "null"]
        if len(kinds) != 1 or len(variants) != 2:
            raise UnknownSchemaError(f"schema: a union must be of one type and null (seen: {schema!r}); change it")
        if schema.get("default") is not None:
            raise UnknownSchemaError(f"schema: the default of a union must be null (seen: {schema!r}); change it")
        around = {key: value for key, value in schema.items() if key != "anyOf"}
        return self.convert(kinds[0] | around)

    def _list(self, items: Schema) -> Schema:
        name = str(items.get("$ref", "")).removeprefix("#/$defs/")
        result: Schema = {"items": self.convert(items)}
        if name in _LISTS_BY_NAME:
            return result | {
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": [_LIST_KEYS.get(name, "name")],
            }
        return result  # Other lists are atomic, which is the default of Kubernetes.

    def _object(self, schema: Schema) -> Schema:
        if "properties" in schema:
            required = set(_items(schema.get("required", [])))
            properties = mapping(schema["properties"])
            return {"properties": {k: self._property(mapping(v), k in required) for k, v in properties.items()}}
        if "patternProperties" in schema:  # A CRD cannot restrict keys, so a rule checks them.
            [values] = map(mapping, mapping(schema["patternProperties"]).values())
        else:
            values = mapping(schema["additionalProperties"])
        if values.get("$ref") == "#/$defs/JsonValue":
            return {"x-kubernetes-preserve-unknown-fields": True}
        return {"additionalProperties": self.convert(values)}

    def _property(self, schema: Schema, required: bool) -> Schema:
        """The schema of a field. pydantic's schema lacks a default that a factory creates; the CRD gets an object with
        the empty maps of its type. The API server checks the rules on this default before it adds the defaults within
        it, and without them each rule on a map would have to check first whether the map is set."""
        result = self.convert(schema)
        if not required and "default" not in schema:
            if result.get("type") != "object":
                raise UnknownSchemaError(
                    f"schema: only objects may have a default factory (seen: {schema!r}); write the default out"
                )
            fields = mapping(result.get("properties", {})).items()
            result["default"] = {name: {} for name, field in fields if "additionalProperties" in mapping(field)}
        return result


def _leave_unchecked(schema: Schema, path: list[str]) -> None:
    """Replaces the fields of the object at a path of the schema by any fields, at most as many as it has."""
    for name in path:
        schema = mapping(mapping(schema["properties"])[name])
    schema["maxProperties"] = len(mapping(schema.pop("properties")))
    schema["x-kubernetes-preserve-unknown-fields"] = True


def _without_descriptions(schema: object) -> object:
    """The schema, or part of a schema, without descriptions, except those that refer to another field. No field is
    named `description`."""
    if isinstance(schema, dict):
        return {
            key: _without_descriptions(value)
            for key, value in schema.items()
            if key != "description" or _REFERENCE_TEXT in str(value)
        }
    return [_without_descriptions(value) for value in schema] if isinstance(schema, list) else schema


def _items(value: object) -> list[object]:
    if not isinstance(value, list):
        raise UnknownSchemaError(f"schema: must be a list (seen: {value!r}); change the type")
    return value
