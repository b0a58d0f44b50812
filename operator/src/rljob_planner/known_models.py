"""Shapes of well-known models by their names on the Hugging Face hub, for a machine that has none of their files.

The sums of parameters that follow from the table are those that are known of the models
(`tests/planner/test_known_models.py`); 111 names were compared with litgpt's table (Lightning-AI/litgpt,
litgpt/config.py) and are equal in layers, widths, heads, experts and vocabulary.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache

from rljob_planner.errors import PlanError
from rljob_planner.known_model_rows import KNOWN_ROWS, KnownRow
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape


def known_names() -> tuple[str, ...]:
    """Of all models in the table, as the hub spells them."""
    return tuple(name for name, _ in _by_name().values())


def known_model(name: str) -> ModelShape | None:
    """The shape of a model by its name on the hub, in capitals or not; None where it is not in the table."""
    found = _by_name().get(name.strip().lower())
    return None if found is None else shape_of_config(found[1].config(), found[0])


def known_model_or_error(name: str, where: str) -> ModelShape:
    """The same; raises PlanError, which says names that are near."""
    shape = known_model(name)
    if shape is not None:
        return shape
    near = near_names(name)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    raise PlanError(
        f"{where}: the shape of this model is not known here (seen {name!r}); {guess}"
        "name its config.json with --model-config FILE, or a folder that holds one"
    )


def near_names(name: str) -> tuple[str, ...]:
    """At most three of the table that read like this one, the nearest first; without the hub's owner, too."""
    by_name = _by_name()
    asked = name.strip().lower()
    by_last = {key.rpartition("/")[2]: key for key in by_name}
    found = difflib.get_close_matches(asked, list(by_name), n=3, cutoff=0.75)
    for last in difflib.get_close_matches(asked.rpartition("/")[2], list(by_last), n=3, cutoff=0.75):
        if by_last[last] not in found:
            found.append(by_last[last])
    return tuple(by_name[key][0] for key in found[:3])


@cache
def _by_name() -> Mapping[str, tuple[str, KnownRow]]:
    """By the name in small letters: the name, and its row."""
    return {name.lower(): (name, row) for row in KNOWN_ROWS for name in row.all_names()}
