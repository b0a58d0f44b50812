"""Replayed responses of several turns, as one row or cut into several, and the training steps that both are compared
in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm, LossAggregation
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.training import recorders, replays
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.datasets.cursor import PromptCursor
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.environments.episode import FinishedEpisode
from rljob_trainer.environments.transcript import SampledTurn, TokenRow, Transcript
from rljob_trainer.workers.columns import (
    IS_LOST,
    IS_TRUNCATED,
    NUM_TOKENS,
    OUTCOME_LIST,
    OUTCOMES,
    POLICY_VERSIONS,
    PROMPT_LENGTHS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    TOKENS,
)
from rljob_trainer.workers.conversations import conversation_columns

TURN = 3
"""Sampled tokens of a turn."""
COLUMNS = (
    *(SAMPLE_IDS, PROMPT_LENGTHS, OUTCOMES, IS_TRUNCATED, IS_LOST, RESPONSE_LENGTHS, NUM_TOKENS),
    *(TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS),
)


class Turns(replays.ReplayedRollouts):
    """Responses of several turns in one row. A row ends with its last sampled token; one without sampled tokens is the
    prompt."""

    num_between = 1
    """Tokens of a message after each turn."""

    def cut(self, batch: DataProto) -> DataProto:
        """The rows of the responses, as a worker makes them of conversations."""
        columns = [batch.ragged_column(name).row_tensors() for name in (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS)]
        outcomes = [OUTCOME_LIST[number] for number in batch[OUTCOMES].tolist()]
        episodes = []
        for number, (tokens, mask, logprobs) in enumerate(zip(*columns, strict=True)):
            places = mask.nonzero()[:, 0]
            is_sampled = torch.arange(len(places)) % (TURN + self.num_between) < TURN
            rows = [
                self._row(tokens, len(tokens) - len(places), part, logprobs)
                for part in self.parts_of(number, places[is_sampled])
            ]
            transcript = Transcript(tuple(rows), (), "", "", "", 0)
            episodes.append(FinishedEpisode(number, outcomes[number], transcript))
        return conversation_columns(episodes, batch[SAMPLE_IDS].tolist()).only(COLUMNS)

    def parts_of(self, number: int, sampled: Tensor) -> Sequence[Tensor]:
        """Returns for each row of response `number` which tokens it trains on."""
        del number
        return [sampled]

    def _row(self, tokens: Tensor, num_prompt_tokens: int, trained: Tensor, logprobs: Tensor) -> TokenRow:
        def number_of_turn(place: int) -> int:
            return (place - num_prompt_tokens) // (TURN + self.num_between)

        turns = []
        for _, of_turn in groupby(trained.tolist(), number_of_turn):
            places = list(of_turn)
            turns.append(SampledTurn(places[0], logprobs[places].tolist(), [0] * len(places)))
        end = int(trained[-1]) + 1 if len(trained) else num_prompt_tokens
        return TokenRow(tokens[:end].tolist(), num_prompt_tokens, tuple(turns))


class AdjacentTurns(Turns):
    """The turns of a response follow each other without a message, so all of its tokens are sampled."""

    num_between = 0


class CutTurns(Turns):
    """The responses of Turns in one to three rows. Each row has all tokens before those that it trains on."""

    def parts_of(self, number: int, sampled: Tensor) -> Sequence[Tensor]:
        """See Turns."""
        return torch.tensor_split(sampled, number % 3 + 1)


@dataclass(frozen=True)
class Outcome:
    """A step on one rank."""

    gradients: list[dict[str, Tensor]]
    """Whole gradients of each update."""
    metrics: dict[str, float]


def _replay(wire: dict[str, object], **settings: int) -> replays.Replay:
    replay = replays.Replay(Algorithm.from_wire(wire), Optimizer(learning_rate=3e-4), mini_batch_size=2)
    return replace(replay, **settings)  # type: ignore[arg-type]


IN_LOSS = {"kl": {"coefficient": 0.1, "placement": "Loss"}, "entropyCoefficient": 0.01}
IN_REWARD = {"kl": {"coefficient": 0.5, "placement": "Reward", "estimator": "K1"}}
SECOND_STEP: Mapping[str, replays.Replay] = {
    **{f"GRPO, {each}": _replay({**IN_LOSS, "aggregation": each.value}) for each in LossAggregation},
    "RLOO, KL in the reward": _replay({"type": "RLOO", "aggregation": "SequenceMeanTokenMean", **IN_REWARD}),
    "Dr.GRPO": _replay({"type": "DrGRPO"}),
    "groups left out": _replay({"aggregation": "SequenceMeanTokenMean", "dropZeroVarianceGroups": True}),
    "truncated responses left out": _replay({"aggregation": "SequenceMeanTokenMean", "maskTruncatedResponses": True}),
    "lengths in the baseline": _replay({"advantage": {"type": "OPO"}, "aggregation": "SequenceMeanTokenMean"}),
    "REINFORCE++": _replay(
        {"type": "ReinforcePlusPlus", "advantage": {"reinforcePlusPlus": {"gamma": 0.9}}, **IN_REWARD}
    ),
    "optimal token baseline": _replay({"advantage": {"type": "OptimalTokenBaseline"}, **IN_REWARD}),
    "policy filtration": _replay({"aggregation": "SequenceMeanTokenMean", "policyFiltration": {"type": "MaxRandom"}}),
    "correction and rejection of tokens": _replay(
        {
            "aggregation": "SequenceMeanTokenMean",
            "rolloutCorrection": {
                "type": "TokenTruncated",
                "maxRatio": 0.5,
                "rejection": {"level": "Token", "estimator": "K2", "max": 2.0},
            },
        }
    ),
    "KL-Cov": _replay({"loss": {"type": "KLCov", "klCov": {"tokenShare": 0.1}}}),
}
"""Compared in the second step, in which the policy differs from the reference."""
FIRST_UPDATE: Mapping[str, replays.Replay] = {
    "GSPO": _replay({"type": "GSPO"}, mini_batch_size=4),
    "GMPO": _replay({"loss": {"type": "GMPO"}, "aggregation": "SequenceMeanTokenMean"}, mini_batch_size=4),
}
"""Losses with a ratio per row, which only in a step's first update is the same for all rows of a response."""
DAPO = _replay({"type": "DAPO", "aggregation": "SequenceMeanTokenMean"})
CASES = {**SECOND_STEP, **FIRST_UPDATE}
SHARED = "two sequence ranks"
"""The first case of FEW on two ranks that share the tokens of their rows."""
FEW = ("GRPO, SequenceMeanTokenMean", "RLOO, KL in the reward", "REINFORCE++", "policy filtration", "GSPO")


def one_step(name: str, rollouts: replays.ReplayedRollouts, context: WorkerContext, **settings: int) -> Outcome:
    """The compared step of a case. `settings`: of the replay. Collective."""
    replay = replace(CASES[name], **settings)  # type: ignore[arg-type]
    run = replays.replayed_run(replay, context, rollout=rollouts)
    step = 1 if name in SECOND_STEP else 0
    run.steps(0, step)
    with recorders.recorded_gradients(run.actor.engine) as gradients:
        return Outcome(gradients, run.step(step))


def sampled_step(rollouts: replays.ReplayedRollouts, context: WorkerContext) -> Outcome:
    """A step with dynamic sampling, which takes every other group. Collective."""
    cursor = PromptCursor(replays.prompts_of(0, 12), seed=0, shuffle=False, digest="any")
    run = replays.replayed_run(DAPO, context, cursor, rollouts)
    with recorders.recorded_gradients(run.actor.engine) as gradients:
        return Outcome(gradients, run.training_step.run(cursor.next_batch(run.replay.batch_size), 0)[1])


def steps_of_rank(context: WorkerContext) -> dict[str, Outcome]:
    """The steps on cut responses, in small micro-batches; on four ranks only FEW of them. Two ranks also make one step
    in which they share the tokens of their rows. Collective."""
    names: Iterable[str] = FEW if context.world_size == 4 else CASES
    found = {name: one_step(name, CutTurns(), context, max_tokens_per_micro_batch=30) for name in names}
    if context.world_size == 2:
        found[SHARED] = one_step(FEW[0], CutTurns(), context, max_tokens_per_micro_batch=15, sequence_parallel=2)
    return found
