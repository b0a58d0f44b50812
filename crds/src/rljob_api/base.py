"""The base of every type that travels: camelCase on the wire, unknown fields refused, values frozen."""

from __future__ import annotations

from types import NoneType
from typing import Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo


def keeps_null(field: FieldInfo) -> bool:
    """Whether an explicit null says something else than leaving the field out: it is allowed and not the default."""
    return not field.is_required() and field.default is not None and NoneType in get_args(field.annotation)


class WireModel(BaseModel):
    """A value of the contract. Python names are snake_case, the wire (YAML, JSON) is camelCase and nothing else."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        extra="forbid",
        frozen=True,
        ser_json_inf_nan="constants",
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: object) -> object:
        """Takes an explicit null for an unset field, as the API server does before it fills in defaults."""
        if not isinstance(data, dict):
            return data
        dropped = set()
        for name, field in cls.model_fields.items():
            if not keeps_null(field):
                dropped |= {name, field.alias}
        return {key: value for key, value in data.items() if value is not None or key not in dropped}

    @classmethod
    def from_wire(cls, data: object) -> Self:
        """The value of a wire form (parsed YAML or JSON): camelCase names only. Raises pydantic.ValidationError."""
        return cls.model_validate(data, by_alias=True, by_name=False)

    def to_wire(self) -> dict[str, object]:
        """The JSON form: camelCase names, unset fields left out (so that an older reader sees no unknown name)."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def to_full_wire(self) -> dict[str, object]:
        """The JSON form with every default written out; a null stands only where leaving it out says something else."""
        return _without_idle_nulls(self, self.model_dump(mode="json", by_alias=True))


def _without_idle_nulls(value: WireModel, wire: dict[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, item in value:
        field = type(value).model_fields[name]
        assert field.alias is not None
        if item is not None or keeps_null(field):
            kept[field.alias] = _item_without_idle_nulls(item, wire[field.alias])
    return kept


def _item_without_idle_nulls(item: object, wire: object) -> object:
    if isinstance(item, WireModel) and isinstance(wire, dict):
        return _without_idle_nulls(item, wire)
    if isinstance(item, tuple) and isinstance(wire, list):
        return [_item_without_idle_nulls(*pair) for pair in zip(item, wire, strict=True)]
    return wire
