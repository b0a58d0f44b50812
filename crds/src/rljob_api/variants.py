"""A part of the learning rule that comes in variants: `type` names one, and a block beside it has its settings.

The block has the name of the enum's member, in lower case: `CLIP_COV` has `clip_cov`. A variant without settings has no
block. So a new variant is a member of the enum, a class for its settings and a field of that class; what the part
resolves to, the rules on its blocks and the reference follow from them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self, TypeVar, get_args

from rljob_api.base import WireModel

BlockT = TypeVar("BlockT", bound=WireModel)


class Variants(WireModel):
    """The base of such a part; its own fields are `type` and the blocks."""

    @classmethod
    def block_type(cls, variant: StrEnum) -> type[WireModel] | None:
        """The class of the variant's settings; None where it has none."""
        field = cls.model_fields.get(block_name(variant))
        annotations = () if field is None else get_args(field.annotation)
        return next((each for each in annotations if isinstance(each, type) and issubclass(each, WireModel)), None)

    def block(self, variant: StrEnum) -> WireModel | None:
        """The variant's settings as they are given."""
        found = dict(self).get(block_name(variant))
        assert found is None or isinstance(found, WireModel)
        return found

    def settings(self, kind: type[BlockT]) -> BlockT:
        """The block of this class, which is that of the variant in use. For a part that is resolved."""
        found = next((value for _, value in self if isinstance(value, kind)), None)
        assert found is not None, f"{type(self).__name__}: no block of {kind.__name__}; resolve the algorithm first"
        return found

    @classmethod
    def of(cls, variant: StrEnum, block: WireModel | None) -> Self:
        """The part with this variant and its block alone."""
        return cls.model_validate({"type": variant} | ({} if block is None else {block_name(variant): block}))


def block_name(variant: StrEnum) -> str:
    """The Python name of the field with the variant's settings."""
    return variant.name.lower()


def may_be_left_out(kind: type[WireModel]) -> bool:
    """Whether a block has a default for each of its fields."""
    return not any(field.is_required() for field in kind.model_fields.values())
