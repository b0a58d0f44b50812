"""Recipes: what each stands for, what a job changes in it, and the resolved form as a job."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.advantage import (
    Advantage,
    AdvantageType,
    Function,
    Gae,
    GroupRelative,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
)
from rljob_api.v1alpha1.algorithm import Algorithm, AlgorithmType, LossAggregation
from rljob_api.v1alpha1.kl import Kl
from rljob_api.v1alpha1.policy_loss import Cispo, Clipped, Divergence, Dppo, Dro, Gspo, Loss, LossType
from rljob_api.v1alpha1.recipes import RECIPES, resolve_algorithm
from rljob_api.v1alpha1.response_selection import (
    DynamicSampling,
    MaxRoundsPolicy,
    PolicyFiltration,
    PolicyFiltrationType,
    Refill,
)

WITHOUT_NEED = sorted(set(LossType) - {LossType.FUNCTION, LossType.DRO})
"""Losses that a job may choose without a settings block."""
OWN = Function(path="mine:own")


def resolved(wire: object) -> Algorithm:
    return resolve_algorithm(Algorithm.from_wire(wire))


def clipped_by(low: float, high: float, dual: float | None) -> Clipped:
    return Clipped(clip_ratio_low=low, clip_ratio_high=high, dual_clip_ratio=dual)


def test_the_default_is_grpo() -> None:
    assert resolved({}) == Algorithm(
        type=AlgorithmType.GRPO,
        advantage=Advantage(type=AdvantageType.GROUP_RELATIVE, group_relative=GroupRelative(normalize_by_std=True)),
        loss=Loss(type=LossType.CLIPPED, clipped=clipped_by(0.2, 0.2, 3.0)),
        aggregation=LossAggregation.TOKEN_MEAN,
        drop_zero_variance_groups=False,
        dynamic_sampling=DynamicSampling(enabled=False),
        entropy_coefficient=0.0,
        kl=Kl(),
    )


def test_dapo_clips_higher_and_samples_until_the_batch_is_full() -> None:
    # arXiv 2503.14476, section 3 and 4.1; ten rounds as in verl's recipe.
    assert resolved({"type": "DAPO"}) == Algorithm(
        type=AlgorithmType.DAPO,
        advantage=Advantage(type=AdvantageType.GROUP_RELATIVE, group_relative=GroupRelative(normalize_by_std=True)),
        loss=Loss(type=LossType.CLIPPED, clipped=clipped_by(0.2, 0.28, 0.0)),
        aggregation=LossAggregation.TOKEN_MEAN,
        drop_zero_variance_groups=True,
        entropy_coefficient=0.0,
        kl=Kl(),
        dynamic_sampling=DynamicSampling(max_rounds=10, on_max_rounds=MaxRoundsPolicy.FAIL, refill=Refill.ROUND),
    )


def test_dynamic_sampling_can_be_added_to_any_recipe_and_turned_off() -> None:
    settings = {"maxRounds": 3, "onMaxRounds": "TrainOnFewer", "reward": "right"}
    rule = resolved({"dynamicSampling": settings})
    assert rule.dynamic_sampling == DynamicSampling(
        max_rounds=3, on_max_rounds=MaxRoundsPolicy.TRAIN_ON_FEWER, refill=Refill.ROUND, reward="right"
    )
    assert rule.drop_zero_variance_groups is True
    assert rule.loss == resolved({}).loss
    off = resolved({"type": "DAPO", "dynamicSampling": {"enabled": False}})
    assert (off.dynamic_sampling, off.drop_zero_variance_groups) == (DynamicSampling(enabled=False), False)
    for each in (rule, off):
        assert resolve_algorithm(each) == each


def test_dr_grpo_divides_by_neither_the_deviation_nor_the_length() -> None:
    rule = resolved({"type": "DrGRPO"})
    assert rule.advantage.group_relative == GroupRelative(normalize_by_std=False)
    assert rule.loss.clipped == clipped_by(0.2, 0.2, 0.0)
    assert rule.aggregation is LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM
    assert rule.drop_zero_variance_groups is False


def test_gspo_and_cispo_have_the_settings_of_their_papers() -> None:
    gspo, cispo = resolved({"type": "GSPO"}), resolved({"type": "CISPO"})
    assert gspo.loss == Loss(type=LossType.GSPO, gspo=Gspo(clip_ratio_low=3e-4, clip_ratio_high=4e-4))
    assert gspo.aggregation is LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN
    assert cispo.loss == Loss(type=LossType.CISPO, cispo=Cispo(clip_ratio_low=1.0, clip_ratio_high=4.0))
    assert cispo.aggregation is LossAggregation.TOKEN_MEAN
    assert gspo.advantage == cispo.advantage == resolved({}).advantage
    assert gspo.kl == cispo.kl == Kl()


def test_the_thresholds_of_dppo_depend_on_the_divergence() -> None:
    total_variation = resolved({"loss": {"type": "DPPO"}}).loss.dppo
    assert total_variation == Dppo(divergence=Divergence.TV, threshold_low=0.15, threshold_high=0.15, max_ratio=20.0)
    written = {"divergence": "KL", "thresholdHigh": 0.1, "maxRatio": 3}
    assert resolved({"loss": {"type": "DPPO", "dppo": written}}).loss.dppo == Dppo(
        divergence=Divergence.KL, threshold_low=0.05, threshold_high=0.1, max_ratio=3.0
    )


def test_every_recipe_is_described() -> None:
    assert set(RECIPES) == set(AlgorithmType)


@pytest.mark.parametrize("recipe", list(AlgorithmType))
def test_fields_of_the_job_override_only_that_part_of_the_recipe(recipe: AlgorithmType) -> None:
    plain, wire = resolved({"type": recipe}), {"type": recipe}
    clipped = resolved(wire | {"loss": {"type": "Clipped"}}).loss.clipped
    assert clipped is not None
    low, high = clipped.clip_ratio_low, clipped.clip_ratio_high
    for written, expected in (
        ({"dualClipRatio": 2}, clipped_by(low, high, 2.0)),
        ({"dualClipRatio": 0}, clipped_by(low, high, 0.0)),
        ({"clipRatioHigh": 0.28}, clipped_by(low, 0.28, clipped.dual_clip_ratio)),
    ):
        rule = resolved(wire | {"loss": {"type": "Clipped", "clipped": written}})
        assert rule.loss == Loss(type=LossType.CLIPPED, clipped=expected)
        assert (rule.advantage, rule.aggregation) == (plain.advantage, plain.aggregation)
    for by_std in (True, False):
        chosen = {"type": "GroupRelative", "groupRelative": {"normalizeByStd": by_std}}
        rule = resolved(wire | {"advantage": chosen})
        assert rule.advantage.group_relative == GroupRelative(normalize_by_std=by_std)
        assert rule.loss == plain.loss
    for aggregation in LossAggregation:
        assert resolved(wire | {"aggregation": aggregation}).aggregation is aggregation
    assert resolved(wire | {"dropZeroVarianceGroups": True}).drop_zero_variance_groups is True
    rest = resolved(wire | {"entropyCoefficient": 0.01, "kl": {"coefficient": 0.1, "estimator": "K1"}})
    assert rest.entropy_coefficient == 0.01
    assert rest.kl == Kl.from_wire({"coefficient": 0.1, "estimator": "K1"})


def test_a_function_replaces_one_part_and_keeps_the_other() -> None:
    own = {"type": "Function", "function": {"path": "mine:own"}}
    rule = resolved({"type": "DrGRPO", "loss": own})
    assert rule.loss == Loss(type=LossType.FUNCTION, function=OWN)
    assert rule.advantage == resolved({"type": "DrGRPO"}).advantage
    rule = resolved({"advantage": own})
    assert rule.advantage == Advantage(type=AdvantageType.FUNCTION, function=OWN)
    assert rule.loss == resolved({}).loss


def test_an_explicit_advantage_has_only_its_own_block() -> None:
    def advantage(**wire: object) -> Advantage:
        return resolved({"advantage": wire}).advantage

    assert advantage(type="GAE", gae={"lambda": 0.95}) == Advantage(type=AdvantageType.GAE, gae=Gae(lambda_=0.95))
    assert advantage(type="GAE").gae == Gae.from_wire({"gamma": 1.0, "lambda": 1.0})
    assert advantage(type="OptimalTokenBaseline").optimal_token_baseline == OptimalTokenBaseline(zero_tail=True)
    assert advantage(type="LeaveOneOut") == Advantage(type=AdvantageType.LEAVE_ONE_OUT)
    of_recipe = resolved({"type": "ReinforcePlusPlus", "advantage": {"reinforcePlusPlus": {"gamma": 0.9}}}).advantage
    assert of_recipe.reinforce_plus_plus == ReinforcePlusPlus(gamma=0.9)


def test_settings_of_unresolved_parts_are_rejected() -> None:
    with pytest.raises(AssertionError, match="Loss: no block of Clipped; resolve the algorithm first"):
        Algorithm(loss=Loss(type=LossType.CLIPPED)).loss.settings(Clipped)
    assert resolved({}).loss.settings(Clipped) == clipped_by(0.2, 0.2, 3.0)


@pytest.mark.parametrize(
    "algorithm",
    [
        *(Algorithm(type=recipe) for recipe in AlgorithmType),
        *(Algorithm(advantage=Advantage(type=each)) for each in AdvantageType if each is not AdvantageType.FUNCTION),
        Algorithm(advantage=Advantage(type=AdvantageType.GAE, gae=Gae(gamma=0.99, lambda_=0.95))),
        Algorithm(advantage=Advantage(type=AdvantageType.FUNCTION, function=OWN), entropy_coefficient=0.5),
        *(Algorithm(loss=Loss(type=chosen)) for chosen in WITHOUT_NEED),
        Algorithm(loss=Loss(type=LossType.DRO, dro=Dro(beta=0.5)), kl=Kl(coefficient=0.1, straight_through=True)),
        Algorithm(type=AlgorithmType.GSPO, loss=Loss(type=LossType.DPPO, dppo=Dppo(threshold_low=0.3))),
        *(Algorithm(policy_filtration=PolicyFiltration(type=each)) for each in PolicyFiltrationType),
        Algorithm(loss=Loss(type=LossType.FUNCTION, function=OWN), drop_zero_variance_groups=True),
        Algorithm(
            type=AlgorithmType.DR_GRPO,
            advantage=Advantage(group_relative=GroupRelative(normalize_by_std=True)),
            loss=Loss(clipped=Clipped(dual_clip_ratio=5.0)),
            kl=Kl(coefficient=0.1),
        ),
    ],
    ids=str,
)
def test_a_resolved_algorithm_is_complete_and_resolves_to_itself(algorithm: Algorithm) -> None:
    rule = resolve_algorithm(algorithm)
    written = rule.to_full_wire()
    assert resolve_algorithm(rule) == rule
    assert resolved(written) == rule
    assert set(written) == {field.alias for field in Algorithm.model_fields.values()}
