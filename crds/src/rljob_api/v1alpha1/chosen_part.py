"""The part of a learning rule that a job chooses, by itself or with its recipe, in the rules on what belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rljob_api.rule import Rule, rule
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import RECIPES

_CHOSEN_BY_RECIPE = {
    "advantage": {str(name): str(recipe.advantage) for name, recipe in RECIPES.items()},
    "loss": {str(name): str(recipe.loss) for name, recipe in RECIPES.items()},
}


def is_chosen_cel(algorithm: str, part: str, types: Collection[str]) -> str:
    """In CEL: whether `recipes.advantage_type` or `recipes.loss_type`, the job's choice or else the recipe's, is one of
    `types`. Without a table from recipes to types: it is in many rules, and all of them are in the CRD."""
    own, recipe = f"{algorithm}.{part}.type", f"{algorithm}.type"
    recipes = [name for name, chosen in _CHOSEN_BY_RECIPE[part].items() if chosen in types]
    if not recipes:
        return f"(has({own}) && {_is_one_of_cel(own, types)})"
    return f"(has({own}) ? {_is_one_of_cel(own, types)} : {_is_one_of_cel(recipe, recipes)})"


def _is_one_of_cel(value: str, names: Collection[str]) -> str:
    texts = [str(name) for name in names]
    return f"{value} in {texts}" if len(texts) > 1 else f"{value} == '{texts[0]}'"


def block_rule(field: str, variant: str, holds: Callable[[Algorithm], bool]) -> Rule:
    """A block of settings may be left out, and belongs to one type of its part. `field` is `.<part>.<block>`."""
    part, block = field[1:].split(".")
    return rule(
        Algorithm,
        f"Algorithm{field}",
        field=field,
        cel=f"!has(self.{part}) || !has(self{field}) || {is_chosen_cel('self', part, [variant])}",
        wrong=f"the block `{block}` is ignored: the {part} that the job chooses is not {variant}",
        advice=f"remove the block, or write `type: {variant}` beside it",
        holds=holds,
    )
