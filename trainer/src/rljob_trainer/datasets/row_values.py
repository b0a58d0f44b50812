"""Values of a row in columns that the job names: the answer, and the source."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rljob_api.v1alpha1.dataset import Dataset
from rljob_trainer.datasets.rows import RawRow
from rljob_trainer.errors import DatasetError

MAX_SOURCES = 50
"""Each source has metrics of its own."""
MAX_SOURCE_CHARACTERS = 100
NOT_IN_METRICS = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that a part of a metric's name must not have in TensorBoard, W&B and MLflow."""


class Sources:
    """The sources of the rows of one dataset: the values of the column `sourceField`."""

    def __init__(self, dataset: Dataset, where: str) -> None:
        """`where`: field path of the dataset."""
        self._column, self._where = dataset.source_field, f"{where}.sourceField"
        self.found: dict[str, tuple[object, str]] = {}
        """By name: the value in the data, and the location of its first row."""

    def name_of(self, raw: RawRow) -> str:
        """Returns the name of the row's source in metrics and samples: the value of the column, with `_` for each
        character that metrics must not have. Empty if the dataset has no `sourceField`.

        Raises DatasetError if the column is missing or has another type, or has too many different values."""
        if self._column is None:
            return ""
        value = value_at(raw, self._column, self._where)
        if not isinstance(value, str | int) or not 0 < len(str(value)) <= MAX_SOURCE_CHARACTERS:
            raise DatasetError(
                f"{raw.location}: column {self._column!r} ({self._where}) must have a string of 1 to "
                f"{MAX_SOURCE_CHARACTERS} characters or an integer, the name of the row's source (seen: "
                f"{value!r:.120}); fix the row, or name another column"
            )
        name = NOT_IN_METRICS.sub("_", str(value))
        if name not in self.found or self.found[name][0] != value:
            self.add({name: (value, raw.location)})
        return name

    def add(self, found: Mapping[str, tuple[object, str]]) -> None:
        """Adds the sources of other rows (`found`). Raises DatasetError if there are too many, or if two have the same
        name in metrics."""
        for name, (value, location) in found.items():
            known, first = self.found.setdefault(name, (value, location))
            if known != value:
                raise DatasetError(
                    f"{self._where}: the sources {known!r} ({first}) and {value!r} ({location}) would both be {name!r} "
                    "in metrics; rename one of them"
                )
            if len(self.found) > MAX_SOURCES:
                raise DatasetError(
                    f"{self._where}: column {self._column!r} has more than {MAX_SOURCES} different values (the last "
                    f"one: {value!r}, {location}), but each source has metrics of its own; name a column with fewer"
                )


def answer_of(raw: RawRow, answer_field: str, dataset: Dataset, where: str) -> object:
    """Returns the expected answer; None if the data has no such column and the job does not set answerField."""
    if "answer_field" not in dataset.model_fields_set and answer_field not in raw.columns:
        return None
    return value_at(raw, answer_field, f"{where}.answerField")


def value_at(raw: RawRow, path: str, where: str) -> object:
    """Returns the value of a column, or a value nested in one: `reward_model.ground_truth`, `messages.0.content`. A
    column whose own name contains the dots has priority.

    Raises DatasetError with `where`, the field path, and the existing names."""
    if path in raw.columns:
        return raw.columns[path]
    value: object = raw.columns
    names = path.split(".")
    for depth, name in enumerate(names):
        parent = ".".join(names[:depth])
        match value:
            case Mapping() if name in value:
                value = value[name]
            case list() if name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            case Mapping():
                there = f"the keys of {parent!r}" if parent else "the columns"
                raise DatasetError(f"{raw.location}: no column {path!r} ({where}); {there} are: {', '.join(value)}")
            case _:
                what = f"not a dictionary ({value!r:.80})"
                if isinstance(value, list):
                    what = f"a list (number of entries: {len(value)})"
                raise DatasetError(f"{raw.location}: no column {path!r} ({where}); {parent!r} is {what}")
    return value
