"""Sums of squared probabilities and entropy cost passes over the vocabulary: they are computed only on request, and
equal the model's. Only updates request entropy, for a metric and for losses.

Legend: R response tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_testing.training import plain_grpo, replays, user_algorithms
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import Loss, TrainEngine
from rljob_trainer.engines.train.token_batch import TokenBatch
from rljob_trainer.engines.train.token_logprobs import Entropy, TokenDistribution
from rljob_trainer.observability.metrics import ENTROPY
from rljob_trainer.workers.columns import SQUARES

OTB: dict[str, object] = {"advantage": {"type": "OptimalTokenBaseline"}}
WANTING: dict[str, object] = {"loss": {"type": "Function", "function": {"path": user_algorithms.COVARIANCE_PATH}}}


def replay_of(wire: dict[str, object]) -> replays.Replay:
    """Two updates, so that old log-probabilities are computed whatever the advantage needs."""
    return replays.Replay(Algorithm.from_wire(wire), num_steps=1, mini_batch_size=2)


@dataclass
class Requests:
    """Whether squares, and which entropy, were requested in each pass."""

    forward: list[bool] = field(default_factory=list)
    updates: list[bool] = field(default_factory=list)
    forward_entropy: list[Entropy] = field(default_factory=list)
    update_entropy: list[Entropy] = field(default_factory=list)


def watched(engine: TrainEngine, monkeypatch: pytest.MonkeyPatch) -> Requests:
    requests = Requests()
    forward, forward_backward = engine.forward, engine.forward_backward

    def recorded_forward(
        batch: TokenBatch,
        temperature: float,
        entropy: Entropy = Entropy.NO,
        *,
        with_squares: bool = False,
        with_adapters: bool = True,
    ) -> TokenDistribution:
        requests.forward.append(with_squares)
        requests.forward_entropy.append(entropy)
        return forward(batch, temperature, entropy, with_squares=with_squares, with_adapters=with_adapters)

    def recorded_update(
        batch: TokenBatch,
        loss: Loss,
        temperature: float,
        entropy: Entropy = Entropy.NO,
        *,
        with_squares: bool = False,
    ) -> None:
        requests.updates.append(with_squares)
        requests.update_entropy.append(entropy)
        forward_backward(batch, loss, temperature, entropy, with_squares=with_squares)

    monkeypatch.setattr(engine, "forward", recorded_forward)
    monkeypatch.setattr(engine, "forward_backward", recorded_update)
    return requests


@pytest.mark.parametrize(
    ("wire", "of_old", "of_updates"),
    [({}, False, False), (OTB, True, False), (WANTING, False, True)],
    ids=["nothing needs them", "the advantage", "the loss"],
)
def test_forward_passes_return_squares_on_request(
    context: WorkerContext,
    monkeypatch: pytest.MonkeyPatch,
    wire: dict[str, object],
    of_old: bool,
    of_updates: bool,
) -> None:
    run = replays.replayed_run(replay_of(wire), context)
    requests = watched(run.actor.engine, monkeypatch)
    found = []
    compute_logprobs = run.group.compute_logprobs
    monkeypatch.setattr(run.group, "compute_logprobs", lambda batch: found.append(compute_logprobs(batch)) or found[-1])
    run.step(0)
    # The loss has a pass over each mini-batch before its update, which does not need squares.
    assert requests.forward == [of_old, *([False, False] if of_updates else [])]
    assert requests.updates == [of_updates] * 2
    assert (SQUARES in found[0].result().ragged) is of_old


def test_squares_equal_those_of_the_model(context: WorkerContext) -> None:
    replay = replace(replay_of(OTB), temperature=0.7)
    run, model = replays.replayed_run(replay, context), plain_grpo.initial_policy()
    column = run.actor.compute_logprobs(plain_grpo.rollout_of(replay, 0)).ragged_column(SQUARES)
    for row, squares_T in zip(plain_grpo.rows_of_step(replay, 0), column.row_tensors(), strict=True):
        with torch.no_grad():
            right_N = row.all_logprobs_NV(model, 0.7).exp().square().sum(dim=1)
        torch.testing.assert_close(squares_T[row.is_response_T], right_N, rtol=1e-5, atol=1e-6)
        assert not squares_T[~row.is_response_T].any()


@pytest.mark.parametrize(("coefficient", "of_updates"), [(0.0, Entropy.VALUE), (0.01, Entropy.GRADIENT)])
def test_only_updates_request_entropy(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch, coefficient: float, of_updates: Entropy
) -> None:
    wire = {"entropyCoefficient": coefficient, "kl": {"coefficient": 0.1, "placement": "Loss"}}
    run = replays.replayed_run(replay_of(wire), context)
    assert run.reference is not None
    requests, of_reference = (watched(each.engine, monkeypatch) for each in (run.actor, run.reference))
    metrics = run.step(0)
    assert (requests.forward_entropy, of_reference.forward_entropy) == ([Entropy.NO], [Entropy.NO])
    assert requests.update_entropy == [of_updates] * 2
    # In nats, of 64 tokens.
    assert 0.1 < metrics[ENTROPY] < math.log(64)


@pytest.mark.parametrize(
    ("wire", "every_steps", "of_steps"),
    [
        ({}, 2, [Entropy.VALUE, Entropy.NO, Entropy.VALUE]),
        ({}, 0, [Entropy.NO] * 3),
        ({"entropyCoefficient": 0.01}, 0, [Entropy.GRADIENT] * 3),
        (WANTING, 2, [Entropy.VALUE] * 3),
    ],
)
def test_entropy_is_computed_in_steps_that_are_due_or_if_the_loss_needs_it(
    context: WorkerContext,
    monkeypatch: pytest.MonkeyPatch,
    wire: dict[str, object],
    every_steps: int,
    of_steps: list[Entropy],
) -> None:
    replay = replace(replay_of(wire), num_steps=3, mini_batch_size=4, entropy_every_steps=every_steps)
    run = replays.replayed_run(replay, context)
    requests = watched(run.actor.engine, monkeypatch)
    metrics = run.steps(0, 3)
    assert requests.update_entropy == of_steps
    assert [ENTROPY in each for each in metrics] == [each is not Entropy.NO for each in of_steps]
