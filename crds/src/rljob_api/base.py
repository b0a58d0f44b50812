"""The base of every type that travels: camelCase on the wire, unknown fields refused, values frozen."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Contract(BaseModel):
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

    def to_wire(self) -> dict[str, object]:
        """The JSON form: camelCase names, unset fields left out (so that an older reader sees no unknown name)."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)
