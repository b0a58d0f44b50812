"""The base class of fields such as `loss`: `type` selects one of several variants, and a block has the variant's
settings.

The name of the block is the name of the enum member in lower case: `CLIP_COV` has the block `clip_cov`. A variant
without settings has no block. To add a variant, add a member to the enum, a class for its settings, and a field of that
class. Recipes, rules on the blocks and the reference page use these definitions; only the trainer needs more code.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self, TypeVar, get_args

from rljob_api.base import WireModel

BlockT = TypeVar("BlockT", bound=WireModel)


class Variants(WireModel):
    """Base class of a part with variants. Its fields are `type` and the blocks."""

    @classmethod
    def block_type(cls, variant: StrEnum) -> type[WireModel] | None:
        """The class of the variant's settings; None if it has no settings."""
        field = cls.model_fields.get(block_name(variant))
        annotations = () if field is None else get_args(field.annotation)
        return next((each for each in annotations if isinstance(each, type) and issubclass(each, WireModel)), None)

    def block(self, variant: StrEnum) -> WireModel | None:
        """The variant's block; None if it is unset."""
        found = dict(self).get(block_name(variant))
        assert found is None or isinstance(found, WireModel)
        return found

    def settings(self, kind: type[BlockT]) -> BlockT:
        """The block of this class. Only for a part that `recipes.resolve_algorithm` returned, and whose variant has
        this block."""
        found = next((value for _, value in self if isinstance(value, kind)), None)
        assert found is not None, f"{type(self).__name__}: no block of {kind.__name__}; resolve the algorithm first"
        return found

    @classmethod
    def of(cls, variant: StrEnum, block: WireModel | None) -> Self:
        """A part with only this variant and its block."""
        return cls.model_validate({"type": variant} | ({} if block is None else {block_name(variant): block}))


def block_name(variant: StrEnum) -> str:
    """The Python name of the variant's block."""
    return variant.name.lower()


def is_optional_block(kind: type[WireModel]) -> bool:
    """Whether a block may be unset, because all of its fields have a default."""
    return not any(field.is_required() for field in kind.model_fields.values())
