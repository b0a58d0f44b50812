"""Paths in `source` and `path` fields: unusual text is an error of the job, not of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_testing.messages import Mentions
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.source_paths import local_path, looks_local

LONG = "x" * 300


@pytest.mark.parametrize(
    "text",
    [
        "~no-such-user/data",
        f"./{LONG}",
        "nul\0byte",
        "package://.a/b",
        "package:///b",
        f"package://rljob_trainer/{LONG}",
    ],
)
def test_a_path_that_cannot_exist_is_a_configuration_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        local_path(text, tmp_path, "spec.field")
    assert str(error.value) == Mentions("spec.field:")


def test_a_long_name_without_folders_is_a_repository(tmp_path: Path) -> None:
    assert not looks_local(f"owner/{LONG}", tmp_path)
