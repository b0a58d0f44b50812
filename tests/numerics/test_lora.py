"""Adapters (LoRA): what is trained, that it does not depend on the layout, and how it is merged and saved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing import compare
from rljob_testing.training import hybrid_runs, lora_runs, replays, step_cases
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.lora import MergeError, merged_weight
from rljob_trainer.observability.metrics import MERGE_ERROR, PPO_KL

SCALING = lora_runs.LORA.alpha / lora_runs.LORA.rank
LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[lora_runs.RankResults]]:
    """Results by the number of ranks."""
    return lora_runs.all_runs(tmp_path_factory.mktemp("checkpoints"))


def outcome(ranks: dict[int, list[lora_runs.RankResults]], name: str) -> step_cases.Outcome:
    return ranks[lora_runs.CASES[name].num_ranks][0].steps[name]


@pytest.mark.parametrize("name", lora_runs.SAME_AS_ONE)
def test_gradients_equal_those_of_one_worker_and_one_pass(
    ranks: dict[int, list[lora_runs.RankResults]], name: str
) -> None:
    found, expected = outcome(ranks, name), outcome(ranks, "one")
    assert len(found.gradients) == len(expected.gradients) == 2
    assert max(map(compare.relative_difference, found.gradients, expected.gradients)) < compare.RELATIVE
    compare.assert_same_metrics(found.metrics, expected.metrics)


def test_the_gradient_follows_from_that_of_the_whole_weight(ranks: dict[int, list[lora_runs.RankResults]]) -> None:
    """y = x W' + s x A' B', and B is 0: the gradient of B is s G A', that of A is 0, where G is that of W."""
    [found, *_], [whole, *_] = outcome(ranks, "first").gradients, outcome(ranks, "all weights").gradients
    drawn = ranks[1][0].trained.first
    of_seconds = {name: gradient for name, gradient in found.items() if ".lora_B." in name}
    expected = {}
    for name in of_seconds:
        layer = name.partition(".lora_B.")[0]
        first = drawn[f"base_model.model.{layer.removeprefix('language_model.')}.lora_A.weight"]
        expected[name] = SCALING * whole[f"{layer}.weight"] @ first.T
    assert compare.relative_difference(of_seconds, expected) < compare.RELATIVE
    of_firsts = [gradient for name, gradient in found.items() if ".lora_A." in name]
    assert len(found) == len(of_seconds) + len(of_firsts)
    assert not any(gradient.any() for gradient in of_firsts)


def test_only_adapters_are_trained_and_saved(ranks: dict[int, list[lora_runs.RankResults]]) -> None:
    for num_ranks, of_ranks in ranks.items():
        trained = of_ranks[0].trained
        names = {name for name in trained.last if not name.startswith("optimizer.")}
        assert names == trained.adapters.keys()
        num_elements = sum(each.numel() for each in trained.adapters.values())
        assert trained.trainable == num_elements
        assert len(trained.optimizer_names) == 3 * len(names)
        # Weights, two moments, and a counter for each; every rank stores its own part.
        assert sum(each.trained.stored for each in of_ranks) == 3 * num_elements + len(names)
        assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in names} == set(LINEAR)
        assert num_ranks in (1, 2)


def test_adapters_start_the_same_on_any_number_of_ranks(ranks: dict[int, list[lora_runs.RankResults]]) -> None:
    one, two = (ranks[count][0].trained.first for count in (1, 2))
    compare.assert_bitwise_equal(two, one)
    firsts = [tensor for name, tensor in one.items() if ".lora_A." in name]
    assert all(tensor.std() > 0 for tensor in firsts)
    assert not any(torch.equal(a, b) for at, a in enumerate(firsts) for b in firsts[:at] if a.shape == b.shape)
    assert not any(tensor.any() for name, tensor in one.items() if ".lora_B." in name)


def test_merging_adds_the_product_and_keeps_the_base(ranks: dict[int, list[lora_runs.RankResults]]) -> None:
    for of_ranks in ranks.values():
        for rank in of_ranks:
            trained = rank.trained
            compare.assert_bitwise_equal(trained.base_after, trained.base)
            assert trained.merged.keys() == trained.base.keys()
            changed = {name for name, tensor in trained.merged.items() if not torch.equal(tensor, trained.base[name])}
            assert len(changed) == len(trained.adapters) / 2
            for name in changed:
                first, second = (
                    trained.adapters[f"base_model.model.{name.removesuffix('weight')}{part}.weight"].double()
                    for part in ("lora_A", "lora_B")
                )
                expected = trained.base[name].double() + SCALING * second @ first
                torch.testing.assert_close(trained.merged[name].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("entry", "at_least"), [(1e-5, 0.9), (1e-4, 0.5), (5e-4, 0.1)])
def test_rounding_to_16_bits_loses_small_adapters_when_they_are_merged(entry: float, at_least: float) -> None:
    torch.manual_seed(0)
    weight_OI, first_RI = 0.15 * torch.randn(64, 96), torch.empty(16, 96)
    torch.nn.init.kaiming_uniform_(first_RI, a=5**0.5)
    second_OR = entry * torch.sign(torch.randn(64, 16))
    of_dtype = {}
    for dtype in (torch.float32, torch.bfloat16):
        error, base_OI = MergeError(), weight_OI.to(dtype)
        found = merged_weight(base_OI, first_RI, second_OR, SCALING, error)
        assert found.dtype is dtype
        exact = base_OI.double() + SCALING * second_OR.double() @ first_RI.double()
        lost, wanted = ((found.double() - exact).norm(), (exact - base_OI.double()).norm())
        of_dtype[dtype] = error.fraction()
        assert of_dtype[dtype] == pytest.approx(float(lost / wanted), rel=0.01, abs=1e-3)
    assert of_dtype[torch.float32] < 0.01
    assert at_least < of_dtype[torch.bfloat16] <= 1.01
    assert MergeError().fraction() == 0


def test_a_run_reports_what_rounding_loses_of_merged_adapters(context: WorkerContext) -> None:
    replay = replays.Replay(lora=lora_runs.LORA, optimizer=Optimizer(learning_rate=1e-4))
    for dtype in (torch.float32, torch.bfloat16):
        run = hybrid_runs.hybrid_run(replace(replay, compute_dtype=dtype), context, None)
        run.steps(0, 2)
        metrics = run.hybrid.take_metrics()
        assert (MERGE_ERROR in metrics) == (dtype is torch.bfloat16)
    # Entries of B are as large as the learning rate.
    assert 0.5 < metrics[MERGE_ERROR] < 1.01


def test_the_reference_is_the_base_without_adapters(ranks: dict[int, list[lora_runs.RankResults]]) -> None:
    for of_ranks in ranks.values():
        for rank in of_ranks:
            trained = rank.trained
            assert torch.equal(trained.reference_logprobs, trained.base_logprobs)
            assert (trained.policy_logprobs - trained.base_logprobs).abs().max() > 0.01


def test_a_resumed_run_is_bitwise_the_same(ranks: dict[int, list[lora_runs.RankResults]]) -> None:
    for rank in ranks[2]:
        compare.assert_bitwise_equal(rank.resumed, rank.trained.last)
        assert compare.relative_difference(rank.trained.saved, rank.trained.last) > 0.01
    [one] = ranks[1]
    for part in ("", "optimizer."):
        found, expected = (
            {name: tensor for name, tensor in state.items() if name.startswith("optimizer.") == bool(part)}
            for state in (one.resumed, ranks[2][0].trained.last)
        )
        assert compare.relative_difference(found, expected) < 1e-3


def test_half_precision_is_close(ranks: dict[int, list[lora_runs.RankResults]]) -> None:
    found, expected = (outcome(ranks, name).gradients[0] for name in ("bfloat16", "one"))
    assert 1e-4 < compare.relative_difference(found, expected) < 0.5


def test_dropout_is_used_for_gradients_only(ranks: dict[int, list[lora_runs.RankResults]]) -> None:
    dropped, whole = (outcome(ranks, name).gradients[0] for name in ("dropout", "first"))
    assert compare.relative_difference(dropped, whole) > 0.1
    for of_ranks in ranks.values():
        first, second = of_ranks[0].dropout_logprobs
        assert torch.equal(first, second)
    # In the only update of a step the policy drops inputs; the old log-probabilities do not.
    assert outcome(ranks, "one update").metrics[PPO_KL] == 0.0
    # PPO_KL is a mean of differences of both signs, so it can be small; the masks differ between processor vendors.
    assert outcome(ranks, "one update, dropout").metrics[PPO_KL] != 0.0
