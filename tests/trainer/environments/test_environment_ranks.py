"""Two ranks that share a model: the first talks with the environments, and the other makes the same calls of its
engine. Ranks are processes; the engine's responses are chosen by the test."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from rljob_testing.environments import class_specs, write_module
from rljob_testing.models import chat_models
from rljob_testing.training import gloo_ranks
from rljob_testing.training.scripted_engine import NEVER, Prompt, ScriptedEngine
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.environments.description import EnvironmentDescription
from rljob_trainer.environments.settings import EnvironmentSettings, EpisodeLimits
from rljob_trainer.rewards.scorer_environment import scorer_environment
from rljob_trainer.workers.columns import (
    DATASET_ROWS,
    ENVIRONMENT_SEEDS,
    NUM_TURNS,
    PROMPT_MESSAGES,
    RESPONSE_TEXTS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
)
from rljob_trainer.workers.environment_rollout import EnvironmentRolloutWorker

CODE = """
class Count:
    def reset(self, word, **row):
        self.left = 2
        return word

    def respond(self, message):
        self.left -= 1
        return f"{self.left}" if self.left else None
"""
SECONDS = 60.0
SAMPLING = SamplingSettings(1.0, 1.0, 0, 100, ())


@dataclass
class Seen:
    """What happened on a rank."""

    requests: list[tuple[str, tuple[int, ...], int]]
    aborted: list[str]
    taken: list[dict[int, tuple[int, str]]]
    """For each round the number of turns, and the text, by SAMPLE_IDS."""


def settings_in(folder: Path) -> EnvironmentSettings:
    return EnvironmentSettings(
        classes=tuple(class_specs("Count")),
        descriptions=(EnvironmentDescription("Count", (), True, False),),
        limits=EpisodeLimits(8, 1000, None, SECONDS, 2),
        max_open=4,
        rollouts_per_process=2,
        timeout_seconds=SECONDS,
        tool_parser=None,
        starts_new_rows=False,
        model_folder=folder / "model",
        log_folder=folder / "logs",
        variables=scorer_environment(os.environ, [], [folder]),
    )


def batch_of(first: int, word: str) -> DataProto:
    ids = torch.arange(first, first + 6)
    rows = tuple({"word": f"{word} {number}"} for number in ids.tolist())
    return DataProto(
        {SAMPLE_IDS: ids, SAMPLE_SEEDS: ids, ENVIRONMENT_SEEDS: ids}, {PROMPT_MESSAGES: (None,) * 6, DATASET_ROWS: rows}
    )


def script(prompt: Prompt) -> str:
    return NEVER if "never" in prompt.text else f"turn {prompt.turn}<|im_end|>"


def rounds_on_a_rank(folder: Path, context: WorkerContext) -> Seen:
    engine = ScriptedEngine(folder / "model", script)
    worker = EnvironmentRolloutWorker(context, lambda: engine, 2, "field", SECONDS, settings_in(folder))
    taken = list[dict[int, tuple[int, str]]]()
    # There is nothing to abort yet.
    worker.abort()
    for word in ("a", "never", "b"):
        num_before = len(engine.requests)
        worker.submit(batch_of(10 * len(taken), word), SAMPLING)
        end, found = time.monotonic() + SECONDS, dict[int, tuple[int, str]]()
        if word == "never":
            # Four of the six have a place. Requests are counted: the leader may abort before the follower looks.
            while len(engine.requests) < num_before + 4:
                assert time.monotonic() < end
                worker.take(0.01)
            worker.abort()
        while worker.host is not None and len(found) < 6 and word != "never":
            assert time.monotonic() < end
            part = worker.take(1.0)
            for sample_id, num_turns, text in zip(
                part[SAMPLE_IDS].tolist(), part[NUM_TURNS].tolist(), part.object_column(RESPONSE_TEXTS), strict=True
            ):
                found[sample_id] = (num_turns, str(text))
        assert not len(worker.take(0.0))
        worker.loop.wait_until_idle()
        assert not engine.open
        taken.append(found)
        # A second time, when nothing is left.
        worker.abort()
        dist.barrier()
    if worker.host is not None:
        worker.host.close()
    requests = [(each.request_id, each.prompt_token_ids, each.seed) for each in engine.requests]
    return Seen(requests, engine.aborted, taken)


def test_both_ranks_make_the_same_calls_of_the_engine(tmp_path: Path) -> None:
    write_module(tmp_path, CODE)
    template = chat_models.TEMPLATES["ChatML"]
    chat_models.save(tmp_path / "model", template, eos_token="<|im_end|>")
    run = gloo_ranks.RankedRun(partial(rounds_on_a_rank, tmp_path), 2)
    [[leader, follower]] = gloo_ranks.run_on_ranks([run])
    assert isinstance(leader, Seen)
    assert isinstance(follower, Seen)
    assert leader.requests == follower.requests
    assert leader.aborted == follower.aborted
    assert len(leader.aborted) == 4
    assert [sorted(each) for each in leader.taken] == [[*range(6)], [], [*range(20, 26)]]
    assert {num_turns for each in leader.taken for num_turns, _ in each.values()} == {2}
    assert follower.taken == [{}, {}, {}]
