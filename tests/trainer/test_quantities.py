"""Kubernetes quantities."""

from __future__ import annotations

import pytest

from rljob_api.quantities import bytes_of


@pytest.mark.parametrize(
    ("text", "number"), [("1Gi", 2**30), ("500M", 5 * 10**8), ("1.5Ki", 1536), ("7", 7), ("2500m", 2)]
)
def test_quantity(text: str, number: int) -> None:
    assert bytes_of(text) == number
