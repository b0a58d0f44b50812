"""A reward function of your own: the fraction of digits that are in the right position."""

from __future__ import annotations


def digits_in_place(prompt: str, response: str, answer: object, row: dict[str, object]) -> float:
    """Returns a score from 0 to 1, for example 0.6 for the response `01395` to a row with the answer `01359`.

    `answer` is the row's answer, here the sorted digits. `prompt` and `row` (the whole row) are not needed here.
    """
    del prompt, row
    wanted = str(answer)
    num_right = sum(given == digit for given, digit in zip(response.strip(), wanted, strict=False))
    return num_right / len(wanted)
