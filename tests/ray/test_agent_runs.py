"""A whole run with an agent that uses OpenAI's client, and with a chat template that rewrites earlier turns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TypedDict

import pytest

from rljob_testing.training import training_runs
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer

pytestmark = [pytest.mark.ray]

TEMPLATE = (
    "{% for message in messages %}{% if message.role != 'assistant' %}{{ message.content }}"
    "{% elif loop.index0 >= messages | length - 5 %}{{ message.content }}<eos>{% endif %}{% endfor %}"
)
"""Leaves out all but the last three turns. The test at the start, which has two turns, does not find that."""
NUM_TURNS = 4
PROXY = "http://127.0.0.1:9"
"""Does not exist, so the agent's requests must not use it."""
AGENT = """
import json, random
from openai import AsyncOpenAI


async def run(session, row, log):
    digit, messages, usages, seen = random.randrange(10), [], [], ""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        for _ in range(4):
            messages.append({"role": "user", "content": f"{digit}>"})
            answer = await client.chat.completions.create(model=session.model, messages=messages, max_tokens=4)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            usages.append((answer.usage.prompt_tokens, answer.usage.completion_tokens))
    # Different in all rollouts. `random` is the same in those of a group.
    score = random.SystemRandom().random()
    with open(log, "a") as file:
        print(json.dumps({"seed": session.seed, "score": score, "messages": messages, "usages": usages}), file=file)
    return score
"""


class Rollout(TypedDict):
    """A rollout as the agent saw it."""

    seed: int
    score: float
    messages: list[ChatMessage]
    usages: list[list[int]]
    """For each turn the number of tokens of its prompt, and that of the sampled tokens."""


def job(folder: Path) -> training_runs.Document:
    """Two steps with two groups of two rollouts, without a dataset."""
    (folder / "my_agent.py").write_text(AGENT)
    shutil.copytree(str(files("rljob_trainer") / "assets" / "sort_digits" / "model"), folder / "model")
    config = folder / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    document = training_runs.small_job(
        model={"source": "./model"},
        environment={
            "type": "Session",
            "session": {"path": "my_agent:run", "arguments": {"log": str(folder / "log.jsonl")}},
            "onRewrite": "NewRow",
            "maxContextTokens": 64,
            "rolloutsPerProcess": 4,
        },
        rollout={"groupSize": 2, "maxNewTokens": 4 * NUM_TURNS},
        steps=2,
        batchSize=2,
    )
    spec = document["spec"]
    assert isinstance(spec, dict)
    training = spec["training"]
    assert isinstance(training, dict)
    del training["dataset"], training["rewards"]
    spec["env"] = [{"name": "HTTP_PROXY", "value": PROXY}]
    return document


def test_an_agent_is_trained_on_what_it_saw(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    run = run_trainer(job(tmp_path), cluster, HTTP_PROXY=PROXY)
    assert run.exit_code == 0, run.terminal
    seen: list[Rollout] = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(seen) == 8
    tokenizer = Tokenizer(tmp_path / "model")
    for each in seen:
        prompts = [prompt for prompt, _ in each["usages"]]
        for turn, grows in ((1, True), (2, True), (3, False)):
            # Before the last turn the template leaves out the first one, so a row begins there.
            assert prompts[turn] == num_tokens(tokenizer, each["messages"][: 2 * turn + 1])
            assert (prompts[turn] >= sum(each["usages"][turn - 1]) + len("0>")) is grows
    for step, rollouts in ((1, seen[:4]), (2, seen[4:])):
        assert len({each["seed"] for each in rollouts}) == 2
        samples = sorted(run.files.samples("train", step), key=lambda sample: float(sample["score"]))
        for sample, own in zip(samples, sorted(rollouts, key=lambda each: each["score"]), strict=True):
            assert float(sample["score"]) == pytest.approx(own["score"])
            assert sample["outcome"] == "COMPLETED"
            assert list(sample["messages"]) == own["messages"]
    # Of the two rows of each rollout, the longer one is recorded.
    recorded = run.files.tokens("training")
    assert recorded["step"] == 2
    rewards = sorted(each["score"] for each in recorded["conversations"] if each["score"] is not None)
    assert rewards == pytest.approx(sorted(each["score"] for each in seen[4:]))
    for conversation in recorded["conversations"]:
        tokens = conversation["tokens"]
        assert tokens["isTrained"] == tokens["isSampled"]
        assert 0 < sum(tokens["isSampled"]) < len(tokens["text"])
        for ours, theirs in zip(tokens["trainerLogprob"], tokens["rolloutLogprob"], strict=True):
            assert ours == theirs is None or ours == pytest.approx(theirs, abs=1e-3)
    for name, values in (
        ("environment/turns/mean", [NUM_TURNS] * 2),
        ("environment/rewritten_fraction", [1.0] * 2),
        ("rows_per_response/mean", [2.0] * 2),
        ("response_length/mean", [sum(map(num_sampled, each)) / 4 for each in (seen[:4], seen[4:])]),
        ("perf/total_num_tokens", [sum(map(num_in_rows, each)) for each in (seen[:4], seen[4:])]),
        ("outcome/completed_fraction", [1.0] * 2),
    ):
        assert run.files.series(name) == pytest.approx(values), name
    assert all(value > 0 for value in run.files.series("actor/grad_norm"))


def num_tokens(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> int:
    """The number of tokens of a prompt as the template writes it."""
    return len(tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False))


def num_sampled(rollout: Rollout) -> int:
    """The number of sampled tokens of a rollout."""
    return sum(completion for _, completion in rollout["usages"])


def num_in_rows(rollout: Rollout) -> int:
    """The number of tokens of its two rows: up to the third turn, and up to the last one."""
    return sum(map(sum, rollout["usages"][-2:]))
