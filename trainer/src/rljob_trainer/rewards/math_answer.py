"""A reward for mathematical equality of the final answer and the row's answer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

from rljob_trainer.rewards.answer_values import why_unusable
from rljob_trainer.rewards.base import MACHINE_ERRORS, RewardRequest, Scored, Scorer
from rljob_trainer.rewards.final_answer import find_answer, reference_answer
from rljob_trainer.rewards.math_text import undecorated
from rljob_trainer.rewards.math_values import Choice, Expression, Listing, Value, Words, is_choice_letter, read_value


@dataclass(frozen=True)
class MathAnswerScorer:
    """1 if the response's final answer equals the row's answer mathematically (`1/2`, `0.5`, `\\frac{1}{2}`), else 0.

    `final_answer` extracts the final answer of a response, `math_equality` compares. The row's answer is a number or an
    expression (plain or LaTeX), a date, a choice, a list of these, or up to six words. If the row has a solution with
    its steps, the answer is the last `<answer>` element, the last box, or the text after the last `####`.
    """

    where: str
    name: str = "MathAnswer"

    def load(self) -> Scorer:
        """Imports math-verify and with it sympy, which takes a second or two."""
        from rljob_trainer.rewards.math_equality import are_equal
        from rljob_trainer.rewards.math_sympy import is_readable

        # math-verify warns that its time limit is off. This is intended: its time limit needs SIGALRM in the main
        # thread, and cannot end a loop in C code. Instead, the process pool kills a process at the time limit.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

        @lru_cache(maxsize=1024)
        def expected_value(text: str) -> Value:
            answer = reference_answer(text)
            reason = why_unusable(undecorated(answer))
            if reason is not None:
                raise ValueError(f"the row's answer is {reason}; correct it, or remove the row")
            value = read_value(answer, is_choice=is_choice_letter(answer))
            if value is None or not all(is_readable(each.text) for each in _expressions(value)):
                raise ValueError(
                    f"the row's answer {text!r:.200} cannot be parsed as a number, an expression, a date, a choice or a"
                    " few words; correct it, or remove the row"
                )
            return value

        def score(request: RewardRequest) -> object:
            reason = why_unusable(request.answer)
            if reason is not None:
                raise ValueError(f"the row's answer is {reason}; correct it, or remove the row")
            expected = expected_value(str(request.answer))
            try:
                found, given = find_answer(
                    request.last_turn, is_choice=isinstance(expected, Choice), is_words=isinstance(expected, Words)
                )
                return Scored(1.0 if given is not None and are_equal(expected, given) else 0.0, found)
            except MACHINE_ERRORS:
                raise
            except Exception as error:
                # A response must never end the run. A response that cannot be parsed or compared counts as wrong.
                return Scored(0.0, f"(cannot be parsed: {type(error).__name__}: {error})")

        return score


def _expressions(value: Value) -> list[Expression]:
    match value:
        case Expression():
            return [value]
        case Listing():
            return [each for item in value.items for each in _expressions(item)]
    return []
