"""The environments of the examples with a change after which nothing can be learned: feedback that says nothing, or a
reward that does not depend on the conversation."""

from __future__ import annotations

import random

from calculator import Calculator
from guess_letter import GuessLetter

RANDOM, SUCCESS = "random", "success"
"""The names of the two numbers of `get_reward` with random rewards."""
coin = random.Random(1)
"""Generator of random rewards, one sequence per process."""


class GuessWithoutFeedback(GuessLetter):
    """The answer to every guess is `?`."""

    def _feedback(self, guess: str) -> str:
        del guess
        return "?"


class GuessWithRandomRewards:
    """The game, with a reward of 1 with a probability of 25 %, about the success of the start model."""

    def __init__(self) -> None:
        self._game = GuessLetter()

    def reset(self) -> str:
        """Hides a letter and returns the first message."""
        return self._game.reset()

    def respond(self, message: dict[str, str]) -> str | None:
        """Returns the answer to a guess, or None at the end of the game."""
        return self._game.respond(message)

    def get_reward(self) -> dict[str, float]:
        """Returns a reward that does not depend on the game, and the real success."""
        return {RANDOM: float(coin.random() < 0.25), SUCCESS: self._game.get_reward()}


class CalculatorWithoutResults(Calculator):
    """The result of every call is `?`."""

    def add(self, expression: str) -> str:
        """Adds two numbers.

        Args:
            expression: The numbers, for example 12+31.
        """
        del expression
        return "?"


class CalculatorWithRandomRewards:
    """The same tool, with a reward of 1 with a probability of 10 %, about the success of the start model."""

    def __init__(self) -> None:
        self._calculator = Calculator()

    def reset(self, numbers: list[int]) -> str:
        """Returns the task for the numbers of a row of the dataset."""
        return self._calculator.reset(numbers)

    def add(self, expression: str) -> str:
        """Adds two numbers.

        Args:
            expression: The numbers, for example 12+31.
        """
        return self._calculator.add(expression)

    def respond(self, message: dict[str, str]) -> None:
        """Takes the answer."""
        self._calculator.respond(message)

    def get_reward(self) -> dict[str, float]:
        """Returns a reward that does not depend on the conversation, and the real success."""
        return {RANDOM: float(coin.random() < 0.1), SUCCESS: self._calculator.get_reward()}
