"""The sources of rows (`sourceField`): their names, and what is rejected."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.dataset import Dataset, DatasetType, FileDataset
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.datasets.row_values import MAX_SOURCES, Sources
from rljob_trainer.datasets.rows import RawRow
from rljob_trainer.errors import DatasetError

WHERE = "spec.training.dataset"


def sources(field: str = "data_source") -> Sources:
    return Sources(Dataset(type=DatasetType.FILE, file=FileDataset(path="a.jsonl"), source_field=field), WHERE)


def row(value: object, number: int = 1) -> RawRow:
    return RawRow(f"a.jsonl, line {number}", {"data_source": value, "extra": {"level": value}})


def test_the_value_is_the_name_in_characters_that_metrics_may_have() -> None:
    found = sources()
    assert [found.name_of(row(value)) for value in ("gsm8k", "openai/gsm8k", "Level 5", 3, "Zürich", "a.b-c")] == [
        *("gsm8k", "openai_gsm8k", "Level_5", "3", "Z_rich", "a.b-c")
    ]
    assert sources("extra.level").name_of(row("x")) == "x"
    assert Sources(Dataset(type=DatasetType.FILE, file=FileDataset(path="a.jsonl")), WHERE).name_of(row("x")) == ""


@pytest.mark.parametrize("value", [None, "", 1.5, ["gsm8k"], {"name": "x"}, "x" * 101])
def test_a_source_is_a_short_string_or_an_integer(value: object) -> None:
    with pytest.raises(
        DatasetError, match=r"a\.jsonl, line 1: column 'data_source' \(spec.training.dataset.sourceField\)"
    ):
        sources().name_of(row(value))


def test_a_missing_column_is_an_error_that_lists_the_columns() -> None:
    with pytest.raises(
        DatasetError, match=r"no column 'origin' \(spec.*sourceField\); the columns are: data_source, extra"
    ):
        sources("origin").name_of(row("x"))


def test_the_number_of_sources_is_limited() -> None:
    found = sources()
    for number in range(2 * MAX_SOURCES):
        found.name_of(row(f"s{number % MAX_SOURCES}", number))
    with pytest.raises(
        DatasetError, match=r"sourceField: column 'data_source' has more than 50 .* 'new', .*, line 99\)"
    ):
        found.name_of(row("new", 99))


def test_two_sources_must_not_have_the_same_name_in_metrics() -> None:
    found = sources()
    found.name_of(row("a/b", 3))
    with pytest.raises(DatasetError, match=r"'a/b' \(a.jsonl, line 3\) and 'a b' \(a.jsonl, line 7\) .* 'a_b'"):
        found.name_of(row("a b", 7))


def test_metrics_name_the_dataset_and_the_source() -> None:
    def names(dataset: str, source: str) -> tuple[str, ...]:
        return PromptRow(0, "", "", (), None, {}, dataset=dataset, source=source).metric_names

    assert names("", "") == ()
    assert (names("maths", ""), names("", "aime")) == (("maths",), ("aime",))
    assert names("maths", "aime") == ("maths", "maths/source/aime")
