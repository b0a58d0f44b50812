"""Scalar types with the bounds that both pydantic and the generated CRD enforce. Strings are never numbers here."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from rljob_api.quantities import SUFFIXES

MAX_COUNT = 2_147_483_647


def _quantity_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _without_nulls(value: object) -> object:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


WITHOUT_NULLS = BeforeValidator(_without_nulls)
"""For maps: an entry whose value is null counts as absent, as on the API server."""

Flag = StrictBool
Integer = StrictInt
Count = Annotated[Integer, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[Integer, Field(ge=1, le=MAX_COUNT)]
Seconds = Annotated[Integer, Field(ge=1, le=MAX_COUNT)]
Number = Annotated[StrictFloat, Field(allow_inf_nan=False)]
NonNegativeNumber = Annotated[Number, Field(ge=0)]
PositiveNumber = Annotated[Number, Field(gt=0)]
Temperature = Annotated[Number, Field(ge=0.01)]
DecayRate = Annotated[Number, Field(ge=0, lt=1)]
"""A number from 0 to below 1."""
OpenFraction = Annotated[Number, Field(gt=0, le=1)]
"""A number above 0 and up to 1."""
Fraction = Annotated[Number, Field(ge=0, le=1)]
"""A number from 0 to 1."""

ShortText = Annotated[StrictStr, Field(min_length=1, max_length=253)]
LongText = Annotated[StrictStr, Field(min_length=1, max_length=4096)]
DnsLabel = Annotated[StrictStr, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
DnsName = Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
EnvName = Annotated[StrictStr, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
AbsolutePath = Annotated[StrictStr, Field(min_length=1, max_length=1024, pattern=r"^/[^\x00]*$")]
Quantity = Annotated[
    StrictStr,
    Field(
        max_length=32,
        pattern=rf"^[0-9]+(\.[0-9]+)?({'|'.join(SUFFIXES)})?$",
        json_schema_extra={"x-kubernetes-int-or-string": True, "minimum": 0},
    ),
    BeforeValidator(_quantity_text),
]
"""A Kubernetes quantity such as `500m`, `2` or `16Gi`; whole numbers may be written without quotes."""
FunctionPath = Annotated[
    StrictStr,
    Field(max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"),
]
"""`package.module:function`."""
