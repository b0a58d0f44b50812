"""Every advantage against numbers that verl 0.9.1 computed; `rljob_testing.golden.verl_cases` describes them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_testing.golden import advantage_cases, verl_cases


@pytest.mark.parametrize("case", advantage_cases.ADVANTAGE_CASES, ids=str)
def test_advantages_equal_verls(case: verl_cases.GoldenCase) -> None:
    verl_cases.check(case)


def test_every_type_has_golden_numbers() -> None:
    others = {"discounted returns", "whitening"}
    assert {case.function for case in advantage_cases.ADVANTAGE_CASES} == {*AdvantageType, *others} - {
        AdvantageType.FUNCTION,
        # verl 0.9.1 has no distillation.
        AdvantageType.DISTILLATION,
    }


class ReadTable(dict[str, object]):
    """A table that records which of its entries are read."""

    def __init__(self, table: Mapping[str, object]) -> None:
        super().__init__(table)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self.names.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("kind", ["advantages", "returns"])
def test_every_golden_number_is_compared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ReadTable(verl_cases.GOLDEN[kind])
    monkeypatch.setitem(verl_cases.GOLDEN, kind, read)
    for case in advantage_cases.ADVANTAGE_CASES:
        case.compare()
    assert read.names == set(read)
