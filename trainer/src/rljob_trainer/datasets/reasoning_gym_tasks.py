"""The `reasoning-gym` library behind types; importing it takes seconds, so only what needs it imports this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS

from rljob_api.names import near_names
from rljob_trainer.errors import DatasetError, TrainerError, described, storage_checked


class ReasoningGymTask(Protocol):
    """A generated data set: a fixed number of entries with `question`, `answer` and `metadata`."""

    def __iter__(self) -> Iterator[dict[str, object]]: ...

    def score_answer(self, answer: str | None, entry: Mapping[str, object]) -> float:
        """From 0 to 1."""


def create_task(task: str, seed: int, size: int, config: Mapping[str, object], where: str) -> ReasoningGymTask:
    """Entry i depends on `seed` + i alone, so data sets whose seeds are closer than their sizes share entries.

    Raises DatasetError, starting with `where`, for an unknown task or settings that the task refuses.
    """
    if task not in DATASETS:
        near = near_names(task, DATASETS, max_names=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"the {len(DATASETS)} tasks: {', '.join(sorted(DATASETS))}"
        )
        raise DatasetError(f"{where}: reasoning-gym has no task {task!r}; {hint}")
    try:
        created: ReasoningGymTask = create_dataset(task, seed=seed, size=size, **config)
    except (AssertionError, TypeError, ValueError, KeyError, AttributeError) as error:
        # Tasks check their settings with assert, and unknown names fail in the constructor.
        known = ", ".join(sorted(set(DATASETS[task][1].__dataclass_fields__) - {"seed", "size"}))
        raise DatasetError(
            f"{where}: the task {task} refuses its settings {dict(config)}: {error}; its settings are: {known}"
        ) from error
    return created


def generated(task: ReasoningGymTask, name: str, where: str) -> Iterator[dict[str, object]]:
    """The entries. Raises DatasetError, starting with `where`, for settings with which the task can make no entry: it
    checks not all of them beforehand."""
    number = -1
    try:
        # Some tasks read files of their package.
        with storage_checked(f"{where}: the task {name}"):
            for number, entry in enumerate(task):  # noqa: B007 (after an error)
                yield entry
    except (TrainerError, MemoryError):
        raise
    except Exception as error:
        raise DatasetError(
            f"{where}: the task {name} fails at row {number + 1} ({described(error)}); change its settings"
        ) from error
