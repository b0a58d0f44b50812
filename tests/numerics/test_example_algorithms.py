"""The advantage and the loss of examples/custom_algorithm: against verl's numbers, and over several workers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rljob_api.job_file import load_job_file
from rljob_api.v1alpha1.advantage import GroupRelative
from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.training import token_rows
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.advantages import group_relative_advantages
from rljob_trainer.algorithms.aggregation import aggregate_loss, count_denominators
from rljob_trainer.algorithms.interfaces import Level, LossInputs, OneWorker, ResponseInputs, TokenInputs
from rljob_trainer.algorithms.loss_registry import policy_loss
from rljob_trainer.algorithms.several_workers import on_workers

FOLDER = Path(__file__).parents[2] / "examples" / "custom_algorithm"
GOLDEN = json.loads((Path(__file__).parent / "golden" / "verl_core_algos.json").read_text())
INPUTS = GOLDEN["inputs"]
MASK_BT = torch.tensor(INPUTS["mask"])
ROWS = token_rows.segments_of_mask(MASK_BT)
# All rewards of the golden inputs are at the last token of a response, as ours are.
REWARDS_B = torch.tensor(INPUTS["token_level_rewards"]).sum(dim=1)
GROUPS_B = torch.tensor([ord(uid) for uid in INPUTS["uid"]])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module, as a job finds it in its folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("my_algorithms")
    sys.modules.pop("my_algorithms")


@pytest.mark.usefixtures("module")
def test_the_job_files_name_the_functions() -> None:
    advantage = resolve_algorithm(load_job_file(FOLDER / "custom-advantage.yaml").spec.training.algorithm)
    loss = resolve_algorithm(load_job_file(FOLDER / "custom-loss.yaml").spec.training.algorithm)
    assert advantage_estimator(advantage, 16).name == "my_algorithms:discounted_returns"
    assert advantage_estimator(advantage, 16).level is Level.TOKEN
    assert policy_loss(loss).name == "my_algorithms:cispo"


def test_discounted_returns_equal_those_of_reinforce_plus_plus(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DISCOUNT", 0.9)
    found = module.discounted_returns.for_tokens(TokenInputs(REWARDS_B, GROUPS_B, ROWS, {}), OneWorker())
    golden_N = token_rows.flat(torch.tensor(GOLDEN["advantages"]["reinforce_plus_plus g=0.9"]), MASK_BT)
    torch.testing.assert_close(found.advantages_N, golden_N, rtol=1e-6, atol=2e-7)


def test_discounted_returns_do_not_depend_on_the_workers(module: ModuleType) -> None:
    function = module.discounted_returns.for_tokens
    whole_N = function(TokenInputs(REWARDS_B, GROUPS_B, ROWS, {}), OneWorker()).advantages_N
    parts = [
        TokenInputs(REWARDS_B[start:stop], GROUPS_B[start:stop], token_rows.segments_of(*ROWS.lengths[start:stop]), {})
        for start, stop in ((0, 1), (1, 1), (1, 6))
    ]
    parts_N = [found.advantages_N for found in on_workers(parts, function)]
    torch.testing.assert_close(torch.cat(parts_N), whole_N)


def test_cispo_equals_verls(module: ModuleType) -> None:
    golden = GOLDEN["policy_loss"]["cispo"]
    logprobs_N = token_rows.flat(torch.tensor(INPUTS["log_prob"]), MASK_BT).requires_grad_()
    old_logprobs_N = token_rows.flat(torch.tensor(INPUTS["old_log_prob"]), MASK_BT)
    inputs = ResponseInputs(REWARDS_B, GROUPS_B, ROWS.lengths_B)
    advantages_N = ROWS.spread(group_relative_advantages(inputs, GroupRelative(normalize_by_std=True)))
    found = module.cispo.compute(LossInputs(ROWS, logprobs_N, old_logprobs_N, advantages_N))
    loss = aggregate_loss(found.losses_N, ROWS, LossAggregation.TOKEN_MEAN, count_denominators(ROWS), 1, 4)
    assert loss.item() == pytest.approx(golden["loss"], rel=1e-5)
    torch.autograd.backward(loss)
    assert logprobs_N.grad is not None
    torch.testing.assert_close(
        logprobs_N.grad, token_rows.flat(torch.tensor(golden["grad"]), MASK_BT), rtol=1e-6, atol=2e-7
    )
    assert found.sums["cispo_clipfrac"].item() / 18 == pytest.approx(golden["metrics"]["actor/pg_clipfrac"])
