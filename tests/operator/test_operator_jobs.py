"""Whole jobs through the operator's process, against a real API server."""

from __future__ import annotations

import pytest

from rljob_testing.operator_process import OperatorProcess
from rljob_testing.operator_process_jobs import JobPlace

pytestmark = pytest.mark.apiserver


def test_a_job_is_brought_to_complete(place: JobPlace, operator: OperatorProcess) -> None:
    place.submit("sorter")
    ended = place.wait_until_ended("sorter")
    print(operator.log())
    assert (ended["type"], ended["reason"]) == ("Complete", "Succeeded")
