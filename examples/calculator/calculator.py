"""The environment of calculator.yaml: a sum of three numbers, and a calculator that adds two. The class needs no import
from RLJob."""

import re


class Calculator:
    """One sum. The model's last turn, the one without a call of the calculator, is its answer."""

    def reset(self, numbers: list[int]) -> str:
        """Returns the task for the numbers of a row of the dataset."""
        self.sum = sum(numbers)
        self.answer = ""
        return "+".join(map(str, numbers)) + ":"

    def add(self, expression: str) -> str:
        """Adds two numbers.

        Args:
            expression: The numbers, for example 12+31.
        """
        found = re.fullmatch(r"(\d{1,4})\+(\d{1,4})", expression)
        return str(int(found[1]) + int(found[2])) if found else "?"

    def respond(self, message: dict[str, str]) -> None:
        """Takes the answer. There is no further message, so the conversation ends."""
        self.answer = message["content"]

    def get_reward(self) -> float:
        """Returns 1 if the answer is the right sum."""
        return float(self.answer == str(self.sum))
