"""The part of a learning rule that a job chooses, by itself or with its recipe, in the rules on what belongs to it."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import RECIPES
from rljob_api.v1alpha1.rule import Rule, rule

_CHOSEN_BY_RECIPE = {
    "advantage": {str(name): str(recipe.advantage) for name, recipe in RECIPES.items()},
    "loss": {str(name): str(recipe.loss) for name, recipe in RECIPES.items()},
}


def chosen_cel(algorithm: str, part: str) -> str:
    """`recipes.advantage_type` and `recipes.loss_type` in CEL: the job's choice, else the recipe's."""
    return f"(has({algorithm}.{part}.type) ? {algorithm}.{part}.type : {_CHOSEN_BY_RECIPE[part]}[{algorithm}.type])"


def block_rule(field: str, chosen: str, variant: str, holds: Callable[[Algorithm], bool]) -> Rule:
    """A block of settings may be left out, and belongs to one type of its part. `field` is `.<part>.<block>`."""
    part, block = field[1:].split(".")
    return rule(
        Algorithm,
        f"Algorithm{field}",
        field=field,
        cel=f"!has(self.{part}) || !has(self{field}) || {chosen} == '{variant}'",
        wrong=f"the block `{block}` is ignored: the {part} that the job chooses is not {variant}",
        advice=f"remove the block, or write `type: {variant}` beside it",
        holds=holds,
    )
