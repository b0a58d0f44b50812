"""Unusual values: each is one error without a traceback, and no message shows a password."""

from __future__ import annotations

import pytest

from rljob_api.errors import JobFileError, Problem
from rljob_api.job_file import load_job_text, load_job_text_to_run
from rljob_api.yaml_text import to_yaml
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions

T = "spec.training."
JUDGE = {"url": "http://judge:8000/v1", "model": "m", "rubric": "{response}", "pattern": "(.)"}
FUNCTION = {"path": "rewards:score"}


def judge(**fields: object) -> dict[str, object]:
    return {T + "rewards": [{"name": "judge", "type": "Judge", "judge": {**JUDGE, **fields}}]}


def remote(url: str) -> dict[str, object]:
    return {T + "rewards": [{"name": "remote", "type": "Remote", "remote": {"url": url}}]}


def bucket(endpoint: str) -> dict[str, object]:
    return {"spec.checkpoint.storage": {"s3": {"bucket": "abc", "endpoint": endpoint}}}


def problem(edits: dict[str, object]) -> Problem:
    with pytest.raises(JobFileError) as caught:
        load_job_text_to_run(to_yaml(valid_job(edits)), "job.yaml")
    [found] = caught.value.problems
    return found


@pytest.mark.parametrize("pattern", ["a{99999999999999999999}", "(" * 500 + "a" + ")" * 500])
def test_patterns_that_python_cannot_compile(pattern: str) -> None:
    edits = {T + "rewards": [{"name": "format", "type": "Format", "format": {"pattern": pattern}}]}
    assert problem(edits).message == Mentions("must be a valid regular expression")
    assert problem(judge(pattern=pattern)).message == Mentions("must be a valid regular expression")


@pytest.mark.parametrize(
    "url", ["http://:80", "http://host:99999/v1", "http://host:abc/v1", "http://[::1/v1", "http:///v1"]
)
def test_urls_that_cannot_be_requested(url: str) -> None:
    for edits in (judge(url=url), remote(url)):
        assert problem(edits).message == Mentions("must have a host", f'(seen: "{url}")')
    for usable in ("http://10.0.0.1:8000", "https://judge.team-a.svc/v1", "http://[::1]:8000/v1", "http://judge"):
        load_job_text(to_yaml(valid_job(judge(url=usable))))


def test_an_endpoint_with_a_port_that_does_not_exist() -> None:
    assert problem(bucket("https://minio:99999")).message == Mentions("must have a host", "65535")


@pytest.mark.parametrize("url", ["http://judge/v1?api-version=2024", "http://judge/v1#part"])
def test_a_path_cannot_be_added_to_the_url_of_a_judge_with_a_query(url: str) -> None:
    assert problem(judge(url=url)).message == Mentions("must have no `?`", "/chat/completions")
    load_job_text(to_yaml(valid_job(remote(url))))


@pytest.mark.parametrize("url", ["s3://models/qwen", "RUN://runs/a", "https://huggingface.co/Qwen/Qwen3-8B"])
def test_urls_that_cannot_be_read_as_a_model_or_a_file(url: str) -> None:
    reference: dict[str, object] = {"spec.roles": {"ref": {"model": {"source": url}}}}
    for edits in ({T + "model.source": url}, reference):
        found = problem(edits)
        assert found.path.endswith("model.source")
        assert found.message == Mentions("Hugging Face repository", "`run://`", f'(seen: "{url}")')
    found = problem({T + "dataset": {"type": "File", "file": {"path": url + "/train.parquet"}}})
    assert found.message == Mentions("path in a volume", "other URLs cannot be read")


def test_a_list_that_is_too_short() -> None:
    assert problem(judge(scale=[1])).message == Mentions("must have at least 2 entries", "add entries")


@pytest.mark.parametrize("name", ["model", "messages", "stream"])
def test_fields_that_the_request_of_a_judge_has_anyway(name: str) -> None:
    found = problem(judge(request={name: True, "max_tokens": 64}))
    assert found.path == "spec.training.rewards[0].judge.request"
    assert found.message == Mentions(f"must not have `{name}`", "`rubric`")


@pytest.mark.parametrize(
    "edits",
    [
        judge(url="https://me:hunter2@host/v1"),
        remote("https://me:hunter2@host/v1"),
        bucket("https://me:hunter2@host"),
        {T + "trackers": [{"type": "MLflow", "mlflow": {"trackingUri": "https://me:hunter2@host"}}]},
    ],
)
def test_no_message_and_no_line_shows_a_password(edits: dict[str, object]) -> None:
    found = problem(edits)
    assert found.message == Mentions("must not contain a user or a password")
    assert "hunter2" not in found.message
    assert found.hides_line


def test_the_source_of_a_model_with_a_password_is_not_shown() -> None:
    found = problem({T + "model.source": "https://me:hunter2@host/model"})
    assert found.message == Mentions("Hugging Face repository", "(seen: a URL with a user)")
    assert found.hides_line


def test_mistakes_that_only_the_trainer_would_report() -> None:
    """On a cluster, its pods exist by then."""
    group = {"name": "group", "type": "Function", "function": {**FUNCTION, "takes": "Group"}}
    refilled = {T + "rewards": [group], T + "onIncompleteGroup": "Refill"}
    assert problem(refilled).message == Mentions("onIncompleteGroup: Refill", "(seen: Group)")
    dataset = {"type": "File", "file": {"path": "held_out.jsonl"}}
    without_steps = {T + "steps": 0, T + "optimizer.warmupSteps": 1, T + "evaluations": [{"dataset": dataset}]}
    assert problem(without_steps).path == "spec.training.optimizer.warmupSteps"
