"""A reward for tasks with one right spelling of the answer."""

from __future__ import annotations


def exact_match(prompt: str, response: str, answer: object, row: dict[str, object]) -> float:
    """1 if the response, without surrounding white space, is the answer; else 0."""
    del prompt, row
    return 1.0 if response.strip() == str(answer) else 0.0
