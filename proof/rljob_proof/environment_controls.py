"""The environments of the examples with a change after which nothing can be learned: feedback that says nothing, or a
reward that does not depend on the conversation."""

from __future__ import annotations

import random

from calculator import Calculator
from guess_letter import GuessLetter

coin = random.Random(1)
"""Generator of random rewards, one sequence per process."""


class GuessWithoutFeedback(GuessLetter):
    """The answer to every guess is `?`."""

    def _feedback(self, guess: str) -> str:
        del guess
        return "?"


class GuessWithRandomRewards(GuessLetter):
    """The score is 1 with a probability of 25 %, about the success of the start model."""

    def get_reward(self) -> float:
        """Returns 1 or 0 without looking at the game."""
        return float(coin.random() < 0.25)


class CalculatorWithoutResults(Calculator):
    """The result of every call is `?`."""

    def add(self, expression: str) -> str:
        """Adds two numbers.

        Args:
            expression: The numbers, for example 12+31.
        """
        del expression
        return "?"


class CalculatorWithRandomRewards(Calculator):
    """The score is 1 with a probability of 10 %, about the success of the start model."""

    def get_reward(self) -> float:
        """Returns 1 or 0 without looking at the conversation."""
        return float(coin.random() < 0.1)
