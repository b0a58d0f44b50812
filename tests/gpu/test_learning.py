"""GRPO on the quickstart's model in one process: actor and generation with transformers on one device.

Legend: B responses.
"""

from __future__ import annotations

import json
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.training.engine_updates import grpo_actor
from rljob_testing.training.whole_rollouts import whole_rollout
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.interfaces import ResponseInputs
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.rewards.exact_match import exact_match
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    IS_TRAINED,
    PROMPT_TOKEN_IDS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    SAMPLE_SEEDS,
    TOKENS,
)
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

TASK = Path(str(files("rljob_trainer"))) / "assets/sort_digits"
SEED = 0
NUM_STEPS = 40
NUM_PROMPTS, GROUP_SIZE = 16, 8
NUM_HELD_OUT = 128
MAX_NEW_TOKENS = 8
SAMPLING = SamplingSettings(1.0, 1.0, 0, MAX_NEW_TOKENS, ())
GREEDY = SamplingSettings(0.0, 1.0, 0, MAX_NEW_TOKENS, ())
MIN_GAIN = 0.3
"""Smallest increase of the fraction of held-out prompts whose greedy response is right."""


class Learner:
    """A GRPO run without a controller: prompts, scores and advantages are made here."""

    def __init__(self, case: DeviceContext, dtype: torch.dtype) -> None:
        optimizer = Optimizer(learning_rate=1e-3, warmup_steps=5)
        algorithm = resolve_algorithm(Algorithm())
        engine = TrainEngineSettings(TASK / "model", case.device, dtype, False, 4096, optimizer)
        num_rows = NUM_PROMPTS * GROUP_SIZE
        sizes = {"group_size": GROUP_SIZE, "num_steps": NUM_STEPS}
        actor = grpo_actor(case.context, engine, optimizer, MAX_NEW_TOKENS, num_rows, **sizes)
        make_engine = partial(HfEngine, HfSettings(TASK / "model", case.device, dtype, num_rows))
        rollout = RolloutWorker(case.context, make_engine, 1)
        self.hybrid = HybridWorker(case.context, actor, rollout, dtype, SEED, others=())
        self.advantages = advantage_estimator(algorithm, GROUP_SIZE)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TASK / "model")

    def step(self, rows: list[dict[str, str]], step: int) -> float:
        """One update on responses to these rows. Returns their mean score."""
        repeated = [row for row in rows for _ in range(GROUP_SIZE)]
        batch, scores_B = self.scored(repeated, SAMPLING, step)
        assert self.advantages.for_responses is not None
        groups_B = torch.arange(len(repeated)) // GROUP_SIZE
        advantages_B = self.advantages.for_responses(ResponseInputs(scores_B, groups_B, batch[RESPONSE_LENGTHS]))
        columns_B = {ADVANTAGES: advantages_B, IS_TRAINED: torch.ones(len(repeated), dtype=torch.bool)}
        self.hybrid.actor.update_policy(batch.with_columns(columns_B), step)
        return float(scores_B.mean())

    def held_out_score(self) -> float:
        """Fraction of held-out prompts whose greedy response is right."""
        return float(self.scored(task_rows("held_out.jsonl")[:NUM_HELD_OUT], GREEDY, NUM_STEPS)[1].mean())

    def scored(
        self, rows: list[dict[str, str]], sampling: SamplingSettings, step: int
    ) -> tuple[DataProto, torch.Tensor]:
        """A response to each row's prompt, and the scores, float32 [B]."""
        prompts = [torch.tensor(self.tokenizer.encode(row["prompt"], add_special_tokens=False)) for row in rows]
        prompt_batch = DataProto(
            {SAMPLE_SEEDS: torch.arange(len(rows)) + step * NUM_PROMPTS * GROUP_SIZE},
            ragged={PROMPT_TOKEN_IDS: RaggedColumn.from_rows(prompts)},
        )
        batch = whole_rollout(self.hybrid, prompt_batch, sampling)
        tokens, masks = (batch.ragged_column(name).row_tensors() for name in (TOKENS, RESPONSE_MASK))
        texts = [
            self.tokenizer.decode(tokens_T[mask_T], skip_special_tokens=True)
            for tokens_T, mask_T in zip(tokens, masks, strict=True)
        ]
        scores = [exact_match("", text, row["answer"], {}) for text, row in zip(texts, rows, strict=True)]
        return batch, torch.tensor(scores)


def task_rows(name: str) -> list[dict[str, str]]:
    """Prompts and answers."""
    return [json.loads(line) for line in (TASK / name).read_text().splitlines()]


def test_the_reward_increases(case: DeviceContext) -> None:
    """In bfloat16 on GPUs, the precision that jobs train with there."""
    dtypes = (torch.float32, torch.bfloat16) if case.device.type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        learner, rows = Learner(case, dtype), task_rows("train.jsonl")
        before = case.note(f"{name}, held out before", learner.held_out_score())
        scores = [learner.step(rows[step * NUM_PROMPTS : (step + 1) * NUM_PROMPTS], step) for step in range(NUM_STEPS)]
        case.note(f"{name}, mean score of the last five steps", sum(scores[-5:]) / 5)
        after = case.note(f"{name}, held out after {NUM_STEPS} steps", learner.held_out_score())
        assert after > before + MIN_GAIN
