"""The checks of `rljob_testing.gpu.engine_program` on this machine's GPUs. `tests/ray/test_vllm_sleep.py` runs their
functions on CPUs, in other combinations."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_testing.gpu.device import missing_device
from rljob_testing.gpu.engine_program import CHECKS, Check, run_check
from rljob_testing.gpu.results import Outcome

pytestmark = [pytest.mark.vllm]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_gpus(check: Check, tmp_path: Path) -> None:
    reason = missing_device("cuda")
    if reason:
        pytest.skip(reason)
    result = run_check(check, "cuda", tmp_path, check.seconds)
    if result.outcome is Outcome.SKIPPED:
        pytest.skip(result.reason)
    assert result.outcome is Outcome.PASSED, result.text()
