"""Slow stages are shown, and the seconds of each stage are kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rljob_kind.progress import Progress


def test_stages_are_printed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(tmp_path / "below" / "seconds.json")
    with progress.stage("first", "8 min"):
        pass
    with pytest.raises(ValueError, match="no"), progress.stage("second"):
        raise ValueError("no")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[e2e] first ... (8 min)"
    assert re.fullmatch(r"\[e2e\] first took 0\.0 s", lines[1])
    assert re.fullmatch(r"\[e2e\] second failed after 0\.0 s", lines[3])
    assert json.loads((tmp_path / "below" / "seconds.json").read_text()) == {"first": 0.0, "second": 0.0}
