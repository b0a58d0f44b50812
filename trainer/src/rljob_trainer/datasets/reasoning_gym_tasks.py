"""A typed interface to the `reasoning-gym` library. Import this module only where it is needed, because importing the
library takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS

from rljob_api.names import similar_names
from rljob_trainer.errors import DatasetError, TrainerError, described, storage_checked


class ReasoningGymTask(Protocol):
    """A generated dataset: a fixed number of entries with `question`, `answer` and `metadata`."""

    def __iter__(self) -> Iterator[dict[str, object]]: ...

    def score_answer(self, answer: str | None, entry: Mapping[str, object]) -> float:
        """Returns the score of an answer, from 0 to 1."""


def create_task(task: str, seed: int, size: int, config: Mapping[str, object], where: str) -> ReasoningGymTask:
    """Creates a task. Entry i only depends on `seed` + i, so two datasets share entries if their seeds differ by less
    than their size.

    Raises DatasetError, starting with `where`, for an unknown task or invalid settings.
    """
    if task not in DATASETS:
        near = similar_names(task, DATASETS, max_names=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"the {len(DATASETS)} tasks: {', '.join(sorted(DATASETS))}"
        )
        raise DatasetError(f"{where}: reasoning-gym has no task {task!r}; {hint}")
    try:
        created: ReasoningGymTask = create_dataset(task, seed=seed, size=size, **config)
    except (AssertionError, TypeError, ValueError, KeyError, AttributeError) as error:
        # Tasks check their settings with assert; unknown settings fail in the constructor.
        known = ", ".join(sorted(set(DATASETS[task][1].__dataclass_fields__) - {"seed", "size"}))
        raise DatasetError(
            f"{where}: the task {task} rejects the settings {dict(config)}: {error}; its settings are: {known}"
        ) from error
    return created


def generated(task: ReasoningGymTask, name: str, where: str) -> Iterator[dict[str, object]]:
    """Yields the entries. Raises DatasetError, starting with `where`, if generating an entry fails, because tasks do
    not check all settings in advance."""
    number = -1
    try:
        # Some tasks read files of the library, so the disk may fail.
        with storage_checked(f"{where}: the task {name}"):
            for number, entry in enumerate(task):  # noqa: B007 (after an error)
                yield entry
    except (TrainerError, MemoryError):
        raise
    except Exception as error:
        raise DatasetError(
            f"{where}: the task {name} fails at row {number + 1} ({described(error)}); change its settings"
        ) from error
