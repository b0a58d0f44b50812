"""A reward for tasks whose answer has exactly one correct spelling: a reward function, which jobs name as
`rljob_trainer.rewards.exact_match:exact_match`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rljob_trainer.rewards.base import MAX_VALUE_CHARACTERS, excerpt, last_turn_of
from rljob_trainer.rewards.final_message import final_message, without_thinking


def exact_match(
    prompt: str,
    response: str,
    answer: object,
    row: dict[str, object],
    messages: Sequence[Mapping[str, object]] = (),
) -> float:
    """1 if the response equals the answer, otherwise 0; surrounding white space is ignored. Of a conversation with an
    environment, the policy's last turn is compared.

    Thinking is removed from the response; if it does not end, nothing is left. The response may match with its special
    tokens or without them. The answer 18.0 also matches 18, because pandas writes a column of integers with nulls as
    floats.

    Raises ValueError for an answer that is neither a string nor a finite number, or is only white space.
    """
    del prompt, row
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not isinstance(answer, str) and not is_number:
        seen = "null" if answer is None else excerpt(repr(answer), MAX_VALUE_CHARACTERS)
        raise ValueError(
            f"the row's answer is {seen}, which is neither a string nor a finite number; correct the dataset"
        )
    expected = str(answer).strip()
    if not expected:
        raise ValueError(f"the row's answer is empty ({answer!r}); correct the dataset")
    spellings = {expected}
    if isinstance(answer, float) and answer.is_integer():
        spellings.add(str(int(answer)))
    response = last_turn_of(messages, response)
    given = {without_thinking(response).strip(), final_message(response).strip()}
    return 0.0 if spellings.isdisjoint(given) else 1.0
