"""A reward by the task's own scorer in the `reasoning-gym` library, and the search for the answer in a response."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rljob_trainer.rewards.base import RewardRequest, Scored, Scorer
from rljob_trainer.rewards.final_message import final_message

ANSWER_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
NUMBER = re.compile(r"(?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?")
"""A minus sign belongs to the number unless it directly follows an operand (`5-3`)."""


class _Task(Protocol):
    def score_answer(self, answer: str | None, entry: Mapping[str, object]) -> float: ...


@dataclass(frozen=True)
class ReasoningGymScorer:
    """The task's `score_answer(answer, entry)`, from 0 to 1, for the answer that `find_answer` extracts.

    Many tasks give a partial score to an answer that contains the right one. Each row names the task that generated it,
    so rows of a held-out set from another task are scored by that task.
    """

    task: str
    config: Mapping[str, object]
    where: str

    @property
    def name(self) -> str:
        """The name for messages, with the task of the training data."""
        return f"ReasoningGym ({self.task})"

    def load(self) -> Scorer:
        """Raises ConfigurationError for an unknown task or settings that the task rejects."""
        from rljob_trainer.datasets.reasoning_gym_tasks import create_task

        tasks: dict[str, _Task] = {self.task: create_task(self.task, 0, 1, self.config, self.where)}

        def score(request: RewardRequest) -> object:
            metadata = request.row.get("metadata")
            task = metadata.get("source_dataset", self.task) if isinstance(metadata, Mapping) else self.task
            if task not in tasks:
                tasks[task] = create_task(task, 0, 1, {}, self.where)
            expected = None if request.answer is None else str(request.answer)
            found = find_answer(request.last_turn, expected)
            return Scored(tasks[task].score_answer(found, request.row), found)

        return score


def find_answer(response: str, expected: str | None) -> str:
    """Extracts the part of the response that is scored, without surrounding white space.

    Thinking and special tokens are removed; if thinking does not end, there is no answer. The answer is

    1. the text after the last `<answer>` tag, up to its end tag if it has one;
    2. otherwise, if a number is expected: the last number of the first line, without thousands separators, because
       small models write `88 + 94 = 182` and then continue with questions of their own;
    3. otherwise, or if the line has no number, the whole response.
    """
    response = final_message(response)
    tagged = ANSWER_TAG.findall(response)
    if tagged:
        return str(tagged[-1]).strip()
    stripped = response.strip()
    if expected is None or not NUMBER.fullmatch(expected.strip()):
        return stripped
    numbers = NUMBER.findall(stripped.partition("\n")[0])
    return str(numbers[-1]).replace(",", "") if numbers else stripped
