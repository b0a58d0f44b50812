"""Every example of every rule on a real API server: the same verdict as pydantic, with our text in the error."""

from __future__ import annotations

import httpx
import pytest

from rljob_api.v1alpha1.rules import RULES
from rljob_testing.cluster import job_requests
from rljob_testing.jobs import rule_examples
from rljob_testing.jobs.valid_job import Bad, valid_job

pytestmark = pytest.mark.apiserver

GOOD_CASES = [(name, edits) for name, examples in rule_examples.GOOD.items() for edits in examples]
BAD_CASES = [(name, bad) for name, examples in rule_examples.BAD.items() for bad in examples]
MESSAGES = {rule.name: rule.message for rule in RULES}


@pytest.mark.parametrize(("rule", "edits"), GOOD_CASES, ids=[name for name, _ in GOOD_CASES])
def test_a_good_example_is_accepted(api: httpx.Client, rule: str, edits: dict[str, object]) -> None:
    answer = job_requests.create(api, valid_job(edits))
    assert answer.status == 201, f"{rule}: {answer.message}"


@pytest.mark.parametrize(("rule", "bad"), BAD_CASES, ids=[name for name, _ in BAD_CASES])
def test_a_bad_example_is_rejected_with_our_text_at_our_path(api: httpx.Client, rule: str, bad: Bad) -> None:
    answer = job_requests.create(api, valid_job(bad.edits))
    assert answer.status == 422
    assert f'{bad.path}: Invalid value: "object": {MESSAGES[rule]}' in answer.message
    expected = {MESSAGES[name] for name in (rule, *bad.also)}
    assert {message for message in MESSAGES.values() if message in answer.message} == expected
