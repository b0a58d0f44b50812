"""Mathematical equality of the final answers, by the `math-verify` library."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rljob_trainer.rewards.base import RewardRequest, Scorer

GSM8K_MARK = "####"


@dataclass(frozen=True)
class MathAnswerScorer:
    """1 if the response's final answer equals the row's mathematically (`1/2`, `0.5`, `\\frac{1}{2}`), else 0.

    The row's answer is a number or an expression, plain or LaTeX; of a worked solution in GSM8K's form the part
    behind the last `####` counts.
    """

    where: str
    name: str = "MathAnswer"

    def load(self) -> Scorer:
        """Imports sympy by way of math-verify: a second or two."""
        from math_verify import parse, verify

        # The library says once that its own time limit is off. It is: that one needs SIGALRM in the main thread and
        # cannot end a loop in C code; ours kills the process.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

        def score(request: RewardRequest) -> object:
            text = str(request.answer).rpartition(GSM8K_MARK)[2].strip()
            is_marked = "$" in text or "\\boxed" in text
            expected = parse(text if is_marked else f"${text}$", parsing_timeout=None)
            if not expected:
                raise ValueError(f"the row's answer is no mathematical expression ({text!r}); mend the dataset")
            given = parse(request.response, parsing_timeout=None)
            return float(verify(expected, given, timeout_seconds=None))

        return score
