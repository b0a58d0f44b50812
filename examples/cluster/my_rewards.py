"""A reward function of one's own: part of a point for every digit in its place."""

from __future__ import annotations


def digits_in_place(prompt: str, response: str, answer: object, row: dict[str, object]) -> float:
    """From 0 to 1. `answer` is the row's answer, here the sorted digits; `prompt` and `row` are there for who needs
    them."""
    del prompt, row
    wanted = str(answer)
    num_right = sum(given == digit for given, digit in zip(response.strip(), wanted, strict=False))
    return num_right / len(wanted)
