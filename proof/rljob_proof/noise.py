"""Rewards that do not depend on whether the response is correct: a coin flip per response, from a hash of its text, the
prompt and a seed."""

from __future__ import annotations

import hashlib

WIN_PROBABILITY = 0.3
"""About the mean score of the model in the first steps of the quickstart."""


def seed_0(prompt: str, response: str, answer: object, row: dict[str, object]) -> float:
    """Returns 1 or 0."""
    del answer, row
    return coin(0, prompt, response)


def seed_1(prompt: str, response: str, answer: object, row: dict[str, object]) -> float:
    """Returns 1 or 0."""
    del answer, row
    return coin(1, prompt, response)


def seed_2(prompt: str, response: str, answer: object, row: dict[str, object]) -> float:
    """Returns 1 or 0."""
    del answer, row
    return coin(2, prompt, response)


def coin(seed: int, prompt: str, response: str) -> float:
    """The same result for the same texts."""
    digest = hashlib.sha256(f"{seed} {prompt} {response}".encode()).digest()
    return float(int.from_bytes(digest[:4]) < WIN_PROBABILITY * 2**32)
