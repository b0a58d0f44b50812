"""Which responses policy filtration draws: by hand, against a slow loop, and what a step then trains on.

Legend: B responses, T tokens of a row, R response tokens of it, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.model import Critic
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_api.v1alpha1.response_selection import FiltrationScope, PolicyFiltration, PolicyFiltrationType
from rljob_testing import compare
from rljob_testing.training import plain_grpo, recorders, replays
from rljob_trainer.algorithms.policy_filtration import drawn_rows, filtration_weights
from rljob_trainer.controller.step_rows import filtered_rows
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.output_head import VALUE_WEIGHT
from rljob_trainer.engines.train.token_model import NAME_PREFIX
from rljob_trainer.observability.metrics import DISTINCT_FRACTION, TRAINED_FRACTION

SCORES = [-1.0, 0.5, 0.0, 2.0, 2.0]
DRAWING = [each for each in PolicyFiltrationType if each is not PolicyFiltrationType.NONE]


def filtration(**wire: object) -> PolicyFiltration:
    return resolve_algorithm(Algorithm.from_wire({"policyFiltration": wire})).policy_filtration


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        ({"type": "Power"}, [0.25, 0.0625, 0, 1, 1]),
        ({"type": "Power", "exponent": 1}, [0.5, 0.25, 0, 1, 1]),
        ({"type": "MaxMin"}, [1, 0, 0, 1, 1]),
        ({"type": "MaxRandom"}, [0.1, 0.1, 0.1, 0.4, 0.4]),
    ],
)
def test_weights_match_a_case_by_hand(wire: dict[str, object], expected: list[float]) -> None:
    """The weights of verl, divided by that of the largest score for Power, and without its 1e-8."""
    weights_B = filtration_weights(torch.tensor(SCORES), filtration(**wire))
    assert weights_B.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("chosen", DRAWING)
def test_equal_scores_are_drawn_with_equal_probability(chosen: PolicyFiltrationType) -> None:
    for score in (0.0, -3.0, 1e200):
        weights_B = filtration_weights(torch.full((4,), score, dtype=torch.float64), filtration(type=chosen))
        assert len(set(weights_B.tolist())) == 1
        assert 0 < weights_B[0] <= 1


def test_rows_match_a_case_by_hand() -> None:
    """Weights 0, 1/3, 1 of the rows that are trained on: the second up to a quarter of the probability, the fourth from
    there on. The third is not trained on."""
    scores_B = torch.tensor([0.0, 1.0, 9.0, 3.0])
    is_trained_B = torch.tensor([True, True, False, True])
    by_size = filtration(type="Power", exponent=1)
    for uniform, row in ((0.0, 1), (0.249, 1), (0.251, 3), (1 - 2.0**-53, 3)):
        uniform_B = torch.full((4,), uniform, dtype=torch.float64)
        drawn_B = drawn_rows(scores_B, torch.zeros(4, dtype=torch.int64), is_trained_B, by_size, uniform_B)
        assert drawn_B.tolist() == [row, row, 2, row]


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([-2.0, 0.0, 0.5, 1.0]), st.integers(0, 2), st.booleans(), st.floats(0, 0.999)),
        min_size=1,
        max_size=12,
    ),
    chosen=st.sampled_from(DRAWING),
    scope=st.sampled_from(FiltrationScope),
)
def test_draws_equal_those_of_a_slow_loop(
    rows: list[tuple[float, int, bool, float]], chosen: PolicyFiltrationType, scope: FiltrationScope
) -> None:
    how = filtration(type=chosen, scope=scope)
    scores, groups, are_trained, uniform = (list(each) for each in zip(*rows, strict=True))
    drawn = drawn_rows(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(groups),
        torch.tensor(are_trained),
        how,
        torch.tensor(uniform, dtype=torch.float64),
    ).tolist()
    for row, drawn_row in enumerate(drawn):
        if not are_trained[row]:
            assert drawn_row == row
            continue
        is_of_group = scope is FiltrationScope.GROUP
        peers = [
            each for each in range(len(rows)) if are_trained[each] and (not is_of_group or groups[each] == groups[row])
        ]
        weights = filtration_weights(torch.tensor([scores[each] for each in peers]), how).tolist()
        left = uniform[row] * sum(weights)
        # If the random number is on the border between two, rounding may decide.
        near = {peers[0]} if left < 1e-12 else set()
        for peer, weight in zip(peers, weights, strict=True):
            if weight and -1e-12 < left < weight + 1e-12:
                near.add(peer)
            left -= weight
        assert drawn_row in near
        assert weights[peers.index(drawn_row)] > 0


def test_the_same_step_draws_the_same_and_another_draws_anew() -> None:
    scores_B, groups_B = torch.arange(64.0), torch.zeros(64, dtype=torch.int64)
    by_power = filtration(type="Power")

    def drawn(seed: int, step: int) -> list[int]:
        return filtered_rows(by_power, scores_B, groups_B, torch.ones(64, dtype=torch.bool), seed, step).tolist()

    assert drawn(1, 2) == drawn(1, 2)
    assert len({tuple(drawn(seed, step)) for seed in (1, 2) for step in (1, 2)}) == 4
    # NumPy's guarantee of a stream, which a resumed run relies on.
    assert drawn(1, 2)[:4] == [60, 60, 58, 50]


@pytest.mark.parametrize("scope", ["Batch", "Group"])
def test_a_step_trains_on_the_drawn_responses_with_advantages_of_the_whole_batch(
    context: WorkerContext, scope: str
) -> None:
    algorithm = Algorithm.from_wire({"policyFiltration": {"type": "MaxRandom", "scope": scope}})
    replay = replays.Replay(algorithm, num_steps=1)
    rows = plain_grpo.rows_of_step(replay, 0)
    scores_B = torch.tensor([row.score for row in rows], dtype=torch.float64)
    advantages = plain_grpo.group_advantages(rows, replay.group_size)
    groups_B = torch.arange(16) // 4
    how, everything_B = replay.resolved.policy_filtration, torch.ones(16, dtype=torch.bool)
    drawn_B = filtered_rows(how, scores_B, groups_B, everything_B, replays.SEED, 0)
    model = plain_grpo.initial_policy()
    trained = [(rows[row].logprobs_N(model, 1.0), advantages[row]) for row in drawn_B.tolist()]
    loss = torch.stack(
        [plain_grpo.clipped_losses(new_N, new_N.detach(), advantage).sum() for new_N, advantage in trained]
    ).sum()
    (loss / sum(len(new_N) for new_N, _ in trained)).backward()  # type: ignore[no-untyped-call]
    expected = {NAME_PREFIX + name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    _, found = plain_grpo.first_update(replay, context)
    assert compare.relative_difference(found, expected) < compare.RELATIVE
    _, undrawn = plain_grpo.first_update(replace(replay, algorithm=Algorithm()), context)
    assert compare.relative_difference(undrawn, expected) > 0.01
    metrics = replays.replayed_run(replay, context).step(0)
    assert metrics[DISTINCT_FRACTION] == len(set(drawn_B.tolist())) / 16 < 1
    assert metrics[TRAINED_FRACTION] == 1


def test_the_critic_trains_on_the_drawn_responses(context: WorkerContext) -> None:
    """A critic that predicts zero has the score of its response as target at each token, and at first only its head has
    a gradient: the mean of -score x (the head's input at the token)."""
    algorithm = Algorithm.from_wire({"type": "PPO", "policyFiltration": {"type": "MaxRandom"}})
    replay = replays.Replay(algorithm, num_steps=1, critic=Critic())
    rows = plain_grpo.rows_of_step(replay, 0)
    scores_B = torch.tensor([row.score for row in rows], dtype=torch.float64)
    how, everything_B = replay.resolved.policy_filtration, torch.ones(16, dtype=torch.bool)
    drawn_B = filtered_rows(how, scores_B, torch.arange(16) // 4, everything_B, replays.SEED, 0)
    decoder = plain_grpo.initial_policy().get_decoder()

    def head_gradient(taken: list[int]) -> dict[str, torch.Tensor]:
        sums, num_tokens = torch.zeros(()), 0
        for row in (rows[number] for number in taken):
            with torch.no_grad():
                hidden_TH = decoder(input_ids=row.tokens_T[None]).last_hidden_state[0]
            hidden_NH = hidden_TH[:-1][row.is_response_T[1:]]
            sums, num_tokens = sums - row.score * hidden_NH.sum(0), num_tokens + len(hidden_NH)
        return {VALUE_WEIGHT: sums[None] / num_tokens}

    run = replays.replayed_run(replay, context)
    assert run.critic is not None
    with recorders.recorded_gradients(run.critic.engine) as gradients:
        run.step(0)
    [update] = gradients
    found = {VALUE_WEIGHT: update.pop(NAME_PREFIX + VALUE_WEIGHT)}
    assert not any(each.any() for each in update.values())
    expected = head_gradient(drawn_B.tolist())
    assert compare.relative_difference(found, expected) < compare.RELATIVE
    assert compare.relative_difference(head_gradient(list(range(16))), expected) > 0.01
