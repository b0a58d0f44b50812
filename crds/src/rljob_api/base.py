"""The base class of all contract types: camelCase on the wire, unknown fields rejected, immutable values."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel


class WireModel(BaseModel):
    """A value of the contract. Fields are snake_case in Python and camelCase in YAML and JSON (the wire form)."""

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
        """Treats an explicit null as an unset field, as the API server does before it fills in defaults."""
        if not isinstance(data, dict):
            return data
        known = {spelling for name, field in cls.model_fields.items() for spelling in (name, field.alias)}
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @classmethod
    def from_wire(cls, data: object) -> Self:
        """Reads the wire form (parsed YAML or JSON, camelCase names only). Raises pydantic.ValidationError if it is
        invalid."""
        return cls.model_validate(data, by_alias=True, by_name=False)

    def to_wire(self) -> dict[str, object]:
        """The wire form with only those fields that were set: an older reader may not know the names of the others."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def to_wire_without_defaults(self) -> dict[str, object]:
        """The wire form without fields that equal their default, set or not.

        If the CRD is newer than the reader, the API server fills in defaults of fields that the reader does not know.
        This form does not contain these defaults. The reader fills in the defaults of its version. So a changed default
        needs a new contract version, just like a changed name."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    def to_full_wire(self) -> dict[str, object]:
        """The wire form with all defaults; without fields whose value is None."""
        return _without_none(self, self.model_dump(mode="json", by_alias=True))


def _without_none(value: WireModel, wire: dict[str, object]) -> dict[str, object]:
    """The wire form of the value without fields whose value is None, at any depth."""
    result: dict[str, object] = {}
    for name, item in value:
        alias = type(value).model_fields[name].alias
        assert alias is not None
        if item is not None:
            result[alias] = _item_without_none(item, wire[alias])
    return result


def _item_without_none(item: object, wire: object) -> object:
    if isinstance(item, WireModel) and isinstance(wire, dict):
        return _without_none(item, wire)
    if isinstance(item, tuple) and isinstance(wire, list):
        return [_item_without_none(*pair) for pair in zip(item, wire, strict=True)]
    return wire
