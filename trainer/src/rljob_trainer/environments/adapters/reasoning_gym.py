"""Tasks of the `reasoning-gym` library, with one or several attempts."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_trainer.datasets.reasoning_gym_tasks import create_task
from rljob_trainer.rewards.base import RewardRequest, Scored
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer

WHERE = "arguments"


class ReasoningGym:
    """The policy answers a question. If its answer is not fully right, it may answer again until no attempt is left.
    The reward is the score of the last answer, from 0 to 1."""

    reusable = True

    def __init__(self, task: str, config: Mapping[str, object] | None = None, attempts: int = 1) -> None:
        """
        Args:
            task: Name of the task, for example `chain_sum`.
            config: Settings of the task, for example `{max_terms: 3}`.
            attempts: Largest number of answers.
        """
        if attempts < 1:
            raise ValueError(f"`attempts` must be at least 1 (seen: {attempts})")
        self._name, self._config, self._attempts = task, dict(config or {}), attempts
        self._scorer = ReasoningGymScorer(task, self._config, WHERE).load()
        self._entry: Mapping[str, object] = {}
        self._attempts_left, self._score = attempts, 0.0

    def reset(self, seed: int, **row: object) -> str | None:
        """Takes the question of the row if there is a dataset of type ReasoningGym; otherwise generates one."""
        self._attempts_left, self._score = self._attempts, 0.0
        if {"question", "answer", "metadata"} <= row.keys():
            self._entry = row
            return None
        self._entry = next(iter(create_task(self._name, int(seed), 1, self._config, WHERE)))
        return str(self._entry["question"])

    def respond(self, message: Mapping[str, str]) -> str | None:
        """Scores an answer."""
        scored = self._scorer(RewardRequest("", message["content"], self._entry["answer"], self._entry))
        assert isinstance(scored, Scored)
        self._score = float(scored.score)
        self._attempts_left -= 1
        if self._score >= 1 or self._attempts_left == 0:
            return None
        return f"Your answer {scored.found!r:.100} is not right. Attempts left: {self._attempts_left}. Answer again."

    def get_reward(self) -> float:
        """The score of the last answer."""
        return self._score
