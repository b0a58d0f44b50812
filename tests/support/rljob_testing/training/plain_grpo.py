"""GRPO on the replayed rollouts as its papers define it, with transformers and PyTorch only: one row at a time, eager
attention, no sharding.

Legend: T tokens of a row, R response tokens of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rljob_testing.training import recorders, replays
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.prompt_batches import sample_seeds
from rljob_trainer.controller.training_step import TRAINING_STREAM
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.workers.columns import RESPONSE_MASK, ROLLOUT_LOGPROBS, SCORES, TOKENS

CLIP_RATIO, DUAL_CLIP_RATIO = 0.2, 3.0
"""The clip ratios of the recipe GRPO."""


def initial_policy() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        replays.MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    return model


@dataclass(frozen=True)
class Row:
    """A prompt, a response and its score."""

    tokens_T: Tensor
    is_response_T: Tensor
    score: float
    rollout_logprobs_N: Tensor
    """Random numbers in place of the rollout engine's log-probabilities; the model does not produce them."""

    def all_logprobs_NV(self, model: nn.Module, temperature: float) -> Tensor:
        """Log-probabilities of all tokens at each response position."""
        logits_TV = model(input_ids=self.tokens_T[None]).logits[0]
        return torch.log_softmax(logits_TV[:-1][self.is_response_T[1:]] / temperature, dim=-1)

    def logprobs_N(self, model: nn.Module, temperature: float) -> Tensor:
        return self.of_targets(self.all_logprobs_NV(model, temperature))

    def of_targets(self, all_NV: Tensor) -> Tensor:
        return all_NV.gather(1, self.tokens_T[self.is_response_T][:, None])[:, 0]


def rollout_of(replay: replays.Replay, step: int) -> DataProto:
    """The replayed responses of a step; those to the same prompt are adjacent."""
    seeds = sample_seeds(replays.SEED, TRAINING_STREAM, step, replay.batch_size * replay.group_size)
    prompts = replays.prompts_of(step, replay.batch_size)
    found = replays.ReplayedRollouts().run(prompts, replay.group_size, replay.plan(1).sampling, seeds)
    return found.batch.union(found.rows)


def rows_of_step(replay: replays.Replay, step: int) -> list[Row]:
    batch = rollout_of(replay, step)
    tokens, masks, before = (
        batch.ragged_column(name).row_tensors() for name in (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS)
    )
    rollout = [row[mask] for row, mask in zip(before, masks, strict=True)]
    return [Row(*each) for each in zip(tokens, masks, batch[SCORES].tolist(), rollout, strict=True)]


def group_advantages(rows: list[Row], group_size: int) -> list[float]:
    """A score minus the mean of its group, divided by the standard deviation of the group."""
    advantages: list[float] = []
    for start in range(0, len(rows), group_size):
        scores = torch.tensor([row.score for row in rows[start : start + group_size]])
        advantages += ((scores - scores.mean()) / (scores.std() + 1e-6)).tolist()
    return advantages


def clipped_losses(new_N: Tensor, old_N: Tensor, advantage: float) -> Tensor:
    ratio_N = (new_N - old_N).exp()
    losses_N = torch.maximum(-advantage * ratio_N, -advantage * ratio_N.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO))
    return losses_N.clamp(max=-advantage * DUAL_CLIP_RATIO) if advantage < 0 else losses_N


def first_update(replay: replays.Replay, context: WorkerContext) -> tuple[replays.ReplayedRun, dict[str, Tensor]]:
    """A run after its first step, and the gradients of its first update."""
    run = replays.replayed_run(replay, context)
    with recorders.recorded_gradients(run.actor.engine) as gradients:
        run.step(0)
    return run, gradients[0]
