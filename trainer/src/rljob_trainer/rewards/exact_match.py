"""A reward for tasks with one right spelling of the answer."""

from __future__ import annotations

import math

from rljob_trainer.rewards.base import MAX_VALUE_CHARACTERS, excerpt
from rljob_trainer.rewards.thinking import without_thinking


def exact_match(prompt: str, response: str, answer: object, row: dict[str, object]) -> float:
    """1 if the response is the answer, both without surrounding white space, else 0. Thinking, which ends with the last
    `</think>`, is no part of the response; one that does not end leaves none.

    Raises ValueError for an answer that has no spelling: null, true and false, NaN, lists, mappings, and white space.
    """
    del prompt, row
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not isinstance(answer, str) and not is_number:
        seen = "null" if answer is None else f"{excerpt(repr(answer), MAX_VALUE_CHARACTERS)}"
        raise ValueError(f"the row's answer is {seen}, which is neither text nor a number; correct the dataset")
    expected = str(answer).strip()
    if not expected:
        raise ValueError(f"the row's answer is empty ({answer!r}); correct the dataset")
    return 1.0 if without_thinking(response).strip() == expected else 0.0
