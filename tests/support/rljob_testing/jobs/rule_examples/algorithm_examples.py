"""Examples for the rules on the algorithm; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from rljob_api.rule import wire_name
from rljob_api.v1alpha1.advantage import Advantage, AdvantageType
from rljob_api.v1alpha1.policy_loss import Loss, LossType
from rljob_api.variants import Variants, block_name, is_optional_block
from rljob_testing.jobs.valid_job import Bad

_T = "spec.training."
_E = _T + "evaluations"
_HELD_OUT = {"dataset": {"type": "File", "file": {"path": "held_out.jsonl"}}}
_K = "spec.checkpoint.everySteps"
_C = _T + "algorithm.rolloutCorrection"
_FUNCTION = {"type": "Function", "function": {"path": "mine:own"}}
_GROUP_RELATIVE: tuple[Mapping[str, object], ...] = (
    {"groupRelative": {}},
    {"type": "GroupRelative", "groupRelative": {"normalizeByStd": True}},
)


def _blocks(part: type[Variants], variants: type[StrEnum], by_default: StrEnum) -> dict[str, str]:
    """Optional blocks and the variant that each belongs to, except the block of the default variant."""
    found = {variant: part.block_type(variant) for variant in variants if variant is not by_default}
    return {
        wire_name(part, block_name(variant)): str(variant)
        for variant, kind in found.items()
        if kind is not None and is_optional_block(kind)
    }


_BLOCKS = _blocks(Advantage, AdvantageType, AdvantageType.GROUP_RELATIVE)
_LOSS_BLOCKS = _blocks(Loss, LossType, LossType.CLIPPED)
_COMPARING = ("GroupRelativePassAtK", "LeaveOneOut", "ReinforcePlusPlusBaseline", "OPO", "GPG")
_TWO_REWARDS = {
    _T + "rewards": [
        {"name": "right", "type": "MathAnswer"},
        {"name": "form", "type": "Format", "format": {"pattern": "a"}},
    ]
}
_KL_IN_REWARD = {"coefficient": 0.1, "placement": "Reward"}
_FILTRATION = _T + "algorithm.policyFiltration"
_ADAPTIVE = {"type": "Adaptive", "adaptive": {"target": 0.1, "horizon": 100}}
_KL_CONTROLLER = _T + "algorithm.kl.controller"
_CLIPPED: tuple[Mapping[str, object], ...] = (
    {"clipped": {}},
    {"type": "Clipped", "clipped": {"clipRatioHigh": 0.28}},
)

GOOD: dict[str, list[Mapping[str, object]]] = {
    "Algorithm.advantage.groupRelative": [
        {_T + "algorithm": {"type": recipe, "advantage": advantage}}
        for recipe in ("GRPO", "DrGRPO")
        for advantage in _GROUP_RELATIVE
    ],
    **{
        f"Algorithm.advantage.{block}": [
            {_T + "algorithm.advantage": {"type": variant, block: {}}},
            {_T + "algorithm.advantage.type": variant},
        ]
        for block, variant in _BLOCKS.items()
    },
    "Training.topK": [
        {_T + "rollout.topK": 2},
        {_T + "rollout.topK": 1, _T + "algorithm.type": "ReinforcePlusPlus"},
    ],
    "Training.gdpoRewards": [{_T + "algorithm.advantage.type": "GDPO", **_TWO_REWARDS}],
    "Algorithm.gdpoKl": [
        {_T + "algorithm": {"advantage": {"type": "GDPO"}, "kl": {"coefficient": 0.1}}, **_TWO_REWARDS},
        {_T + "algorithm": {"advantage": {"type": "OPO"}, "kl": _KL_IN_REWARD}},
    ],
    "Algorithm.loss.clipped": [
        *({_T + "algorithm": {"type": recipe, "loss": loss}} for recipe in ("GRPO", "DrGRPO") for loss in _CLIPPED),
        {_T + "algorithm": {"type": "GSPO", "loss": {"gspo": {}}}},
        {_T + "algorithm": {"type": "CISPO", "loss": {"cispo": {"clipRatioHigh": 3}}}},
    ],
    **{
        f"Algorithm.loss.{block}": [
            {_T + "algorithm.loss": {"type": variant, block: {}}},
            {_T + "algorithm.loss": {"type": variant}},
            {_T + "algorithm": {"type": "GSPO", "loss": {"type": variant, block: {}}}},
        ]
        for block, variant in _LOSS_BLOCKS.items()
    },
    "ClipCov.covarianceHigh": [{_T + "algorithm.loss": {"type": "ClipCov", "clipCov": {"covarianceLow": -1}}}],
    "Clipped.dualClipRatio": [
        {_T + "algorithm.loss.clipped.dualClipRatio": 1.001},
        {_T + "algorithm.loss.clipped.dualClipRatio": 3},
        {_T + "algorithm.loss.clipped.dualClipRatio": 0},
        {_T + "algorithm.loss.clipped.dualClipRatio": None},
    ],
    "Kl.estimator": [
        {_T + "algorithm.kl": {"coefficient": 0.1, "estimator": "K1"}},
        {_T + "algorithm.kl.estimator": "K3"},
    ],
    **{
        f"Kl.{name}": [
            {_T + "algorithm.kl": {"coefficient": 0.1, "estimator": "K1", "straightThrough": True}},
            {_T + "algorithm.kl": {"coefficient": 0.1, "placement": "Reward", "straightThrough": False}},
            {_T + "algorithm.kl": {"coefficient": 0.1, "estimator": "K2"}},
        ]
        for name in ("straightThrough", "straightThroughInReward", "straightThroughOfK2")
    },
    "Kl.placement": [
        {_T + "algorithm.kl": {"coefficient": 0.1, "placement": "Reward"}},
        {_T + "algorithm.kl.placement": "Loss"},
    ],
    "Kl.controller": [
        {_T + "algorithm.kl": {"coefficient": 0.1, "controller": _ADAPTIVE}},
        {_KL_CONTROLLER + ".type": "Fixed"},
    ],
    "Training.klHorizon": [
        {
            _T + "batchSize": 8,
            _T + "rollout.groupSize": 5,
            _T + "algorithm.kl": {
                "coefficient": 0.1,
                "controller": _ADAPTIVE | {"adaptive": {"target": 1, "horizon": 9}},
            },
        },
    ],
    "PolicyFiltration.exponent": [
        {_FILTRATION: {"type": "Power", "exponent": 0.5}},
        {_FILTRATION: {"type": "Power"}},
        {_FILTRATION + ".type": "MaxMin"},
    ],
    "PolicyFiltration.scope": [{_FILTRATION: {"type": "MaxRandom", "scope": "Group"}}, {_FILTRATION + ".type": "None"}],
    "Training.policyFiltration": [
        {_FILTRATION: {"type": "MaxMin", "scope": "Batch"}, _T + "rollout.groupSize": 1, _T + "algorithm.type": "PPO"},
        {_FILTRATION: {"type": "MaxMin", "scope": "Group"}},
    ],
    "RolloutCorrection.maxRatio": [
        {_C: {"type": "TokenTruncated", "maxRatio": 1.5}},
        {_C + ".type": "None"},
    ],
    "RolloutCorrection.minRatio": [
        {_C: {"type": "TokenMasked", "minRatio": 0.5}},
        {_C: {"type": "SequenceMasked", "minRatio": 0.5}},
        {_C: {"type": "SequenceTruncated"}},
    ],
    "RolloutCorrection.ratios": [
        {_C: {"type": "TokenMasked", "minRatio": 1.9}},
        {_C: {"type": "TokenMasked", "minRatio": 2.5, "maxRatio": 3}},
    ],
    "RolloutCorrection.maskedRatio": [
        {_C: {"type": "TokenMasked", "maxRatio": 1.01}},
        {_C: {"type": "TokenMasked", "minRatio": 0.1, "maxRatio": 0.9}},
        {_C: {"type": "TokenTruncated", "maxRatio": 0.9}},
    ],
    "RolloutCorrection.oldLogprobs": [
        {_C + ".oldLogprobs": "Rollout"},
        {_C: {"oldLogprobs": "Rollout", "type": "None"}},
        {_C: {"oldLogprobs": "Trainer", "type": "TokenTruncated"}},
    ],
    "Algorithm.oldLogprobs": [
        {_C + ".oldLogprobs": "Trainer", _T + "algorithm.advantage.type": "OptimalTokenBaseline"},
        {_C + ".oldLogprobs": "Rollout", _T + "algorithm.advantage.type": "OPO"},
        {_C + ".oldLogprobs": "Rollout", _T + "algorithm.loss.type": "SAPO"},
        {_C + ".oldLogprobs": "Trainer", _T + "algorithm.loss.type": "GPG"},
    ],
    "RolloutRejection.estimator": [
        {_C + ".rejection": {"level": "SequenceMax", "estimator": "K2", "max": 0.1}},
        {_C + ".rejection": {"level": "Token", "max": 2}},
    ],
    "RolloutRejection.min": [{_C + ".rejection": {"level": "Token", "max": 2, "min": 0.1}}],
    "RolloutRejection.bounds": [
        {_C + ".rejection": {"level": "Token", "max": 1.01}},
        {_C + ".rejection": {"level": "SequenceMean", "max": 0.9, "min": 0.8}},
        {_C + ".rejection": {"level": "SequenceMean", "estimator": "K3", "max": 0.9}},
    ],
    "RLJobSpec.syncEverySteps": [{_T + "rollout.syncEverySteps": 3, _E: [_HELD_OUT | {"everySteps": 3}], _K: 9}],
    "Training.rolloutCorrection": [
        {_T + "rollout.topP": 0.9},
        {_T + "rollout.topK": 5, _C + ".type": "None"},
        {_T + "rollout.topK": 5, _C + ".oldLogprobs": "Trainer"},
        {_C + ".type": "TokenTruncated"},
    ],
    "Training.groupSize": [
        {_T + "rollout.groupSize": 2},
        {_T + "rollout.groupSize": 1, _T + "algorithm.advantage": _FUNCTION},
        *({_T + "rollout.groupSize": 1, _T + "algorithm.advantage.type": each} for each in ("ReMax", "GAE")),
        {_T + "rollout.groupSize": 1, _T + "algorithm.type": "ReinforcePlusPlus"},
    ],
    "Training.dropZeroVarianceGroups": [
        {_T + "algorithm.dropZeroVarianceGroups": True},
        {
            _T + "algorithm": {"dropZeroVarianceGroups": False, "advantage": _FUNCTION},
            _T + "rollout.groupSize": 1,
        },
    ],
}

BAD: dict[str, list[Bad]] = {
    "Algorithm.advantage.groupRelative": [
        Bad(_T + "algorithm.advantage.groupRelative", {_T + "algorithm.advantage": _FUNCTION | {"groupRelative": {}}}),
    ],
    **{
        f"Algorithm.advantage.{block}": [
            Bad(f"{_T}algorithm.advantage.{block}", {f"{_T}algorithm.advantage.{block}": {}}),
            Bad(f"{_T}algorithm.advantage.{block}", {_T + "algorithm.advantage": {"type": "GPG", block: {}}}),
        ]
        for block in _BLOCKS
    },
    "Training.gdpoRewards": [
        Bad(_T + "rewards", {_T + "algorithm.advantage.type": "GDPO"}),
        Bad(
            _T + "rewards",
            {
                _T + "algorithm.advantage.type": "GDPO",
                _T + "rewards": [{"name": "right", "type": "MathAnswer"}, {"type": "MathAnswer", "weight": 0}],
            },
        ),
    ],
    "Training.topK": [
        Bad(_T + "rollout.topK", {_T + "rollout.topK": 1}),
        Bad(_T + "rollout.topK", {_T + "rollout.topK": 1, _T + "algorithm.type": "ReMax"}),
    ],
    "Algorithm.gdpoKl": [
        Bad(
            _T + "algorithm.kl.placement",
            {_T + "algorithm": {"advantage": {"type": "GDPO"}, "kl": _KL_IN_REWARD}, **_TWO_REWARDS},
        ),
    ],
    "Algorithm.loss.clipped": [
        Bad(
            _T + "algorithm.loss.clipped",
            {_T + "algorithm": {"type": "DrGRPO", "loss": _FUNCTION | {"clipped": {"clipRatioLow": 0.1}}}},
        ),
    ],
    **{
        f"Algorithm.loss.{block}": [
            Bad(_T + f"algorithm.loss.{block}", {_T + f"algorithm.loss.{block}": {}}),
            Bad(_T + f"algorithm.loss.{block}", {_T + "algorithm.loss": {"type": "GPG", block: {}}}),
        ]
        for block in _LOSS_BLOCKS
    },
    "ClipCov.covarianceHigh": [
        Bad(
            _T + "algorithm.loss.clipCov.covarianceHigh",
            {_T + "algorithm.loss": {"type": "ClipCov", "clipCov": {"covarianceHigh": 1}}},
        ),
    ],
    "Clipped.dualClipRatio": [
        Bad(_T + "algorithm.loss.clipped.dualClipRatio", {_T + "algorithm.loss.clipped.dualClipRatio": 1}),
        Bad(_T + "algorithm.loss.clipped.dualClipRatio", {_T + "algorithm.loss.clipped.dualClipRatio": 0.5}),
    ],
    "Kl.estimator": [Bad(_T + "algorithm.kl.estimator", {_T + "algorithm.kl.estimator": "K1"})],
    "Kl.straightThrough": [
        Bad(_T + "algorithm.kl.straightThrough", {_T + "algorithm.kl.straightThrough": True}),
    ],
    "Kl.straightThroughInReward": [
        Bad(
            _T + "algorithm.kl.straightThrough",
            {_T + "algorithm.kl": {"coefficient": 0.1, "placement": "Reward", "straightThrough": True}},
        ),
    ],
    "Kl.straightThroughOfK2": [
        Bad(
            _T + "algorithm.kl.straightThrough",
            {_T + "algorithm.kl": {"coefficient": 0.1, "estimator": "K2", "straightThrough": True}},
        ),
    ],
    "Kl.placement": [
        Bad(_T + "algorithm.kl.placement", {_T + "algorithm.kl": {"coefficient": 0, "placement": "Reward"}})
    ],
    "Kl.controller": [
        Bad(_KL_CONTROLLER, {_T + "algorithm.kl": {"controller": _ADAPTIVE}}),
        Bad(_KL_CONTROLLER, {_T + "algorithm.kl": {"coefficient": 0, "controller": _ADAPTIVE}}),
    ],
    "Training.klHorizon": [
        Bad(
            _KL_CONTROLLER + ".adaptive.horizon",
            {
                _T + "batchSize": 8,
                _T + "rollout.groupSize": 5,
                _T + "algorithm.kl": {
                    "coefficient": 0.1,
                    "controller": _ADAPTIVE | {"adaptive": {"target": 1, "horizon": 8}},
                },
            },
        ),
    ],
    "PolicyFiltration.exponent": [
        Bad(_FILTRATION + ".exponent", {_FILTRATION + ".exponent": 2}),
        Bad(_FILTRATION + ".exponent", {_FILTRATION: {"type": "MaxMin", "exponent": 2}}),
    ],
    "PolicyFiltration.scope": [Bad(_FILTRATION + ".scope", {_FILTRATION + ".scope": "Batch"})],
    "Training.policyFiltration": [
        Bad(
            _FILTRATION + ".scope",
            {
                _FILTRATION: {"type": "MaxMin", "scope": "Group"},
                _T + "rollout.groupSize": 1,
                _T + "algorithm.advantage.type": "GAE",
            },
        ),
    ],
    "RolloutCorrection.maxRatio": [
        Bad(_C + ".maxRatio", {_C + ".maxRatio": 2}),
        Bad(_C + ".maxRatio", {_C: {"type": "None", "maxRatio": 2}}),
    ],
    "RolloutCorrection.minRatio": [
        Bad(_C + ".minRatio", {_C: {"type": "TokenTruncated", "minRatio": 0.5}}),
        Bad(_C + ".minRatio", {_C: {"minRatio": 0.5}}),
    ],
    "RolloutCorrection.ratios": [
        Bad(_C + ".minRatio", {_C: {"type": "TokenMasked", "minRatio": 2}}),
        Bad(_C + ".minRatio", {_C: {"type": "TokenMasked", "minRatio": 0.9, "maxRatio": 0.8}}),
    ],
    "RolloutCorrection.maskedRatio": [Bad(_C + ".maxRatio", {_C: {"type": "SequenceMasked", "maxRatio": 1}})],
    "RolloutCorrection.oldLogprobs": [
        Bad(_C + ".oldLogprobs", {_C: {"oldLogprobs": "Rollout", "type": "TokenMasked"}}),
        Bad(_C + ".oldLogprobs", {_C: {"oldLogprobs": "Rollout", "rejection": {"level": "Token", "max": 2}}}),
    ],
    "Algorithm.oldLogprobs": [
        Bad(
            _C + ".oldLogprobs",
            {_C + ".oldLogprobs": "Rollout", _T + "algorithm.advantage.type": "OptimalTokenBaseline"},
        ),
        Bad(_C + ".oldLogprobs", {_C + ".oldLogprobs": "Rollout", _T + "algorithm.loss.type": "GPG"}),
    ],
    "RolloutRejection.estimator": [
        Bad(_C + ".rejection.estimator", {_C + ".rejection": {"level": "SequenceMax", "max": 2}}),
    ],
    "RolloutRejection.min": [
        Bad(_C + ".rejection.min", {_C + ".rejection": {"level": "Token", "estimator": "K3", "max": 2, "min": 1}}),
    ],
    "RolloutRejection.bounds": [
        Bad(_C + ".rejection.max", {_C + ".rejection": {"level": "Token", "max": 1}}),
        Bad(_C + ".rejection.max", {_C + ".rejection": {"level": "Token", "max": 1.5, "min": 1.5}}),
    ],
    "RLJobSpec.syncEverySteps": [
        Bad(_K, {_T + "rollout.syncEverySteps": 5, _E: [_HELD_OUT | {"everySteps": 5}], _K: 12}),
    ],
    "Training.rolloutCorrection": [
        Bad(_C, {_T + "rollout.topP": 0.9, _C + ".type": "TokenTruncated"}),
        Bad(_C, {_T + "rollout.topK": 9, _C + ".rejection": {"level": "Token", "max": 2}}),
        Bad(_C, {_T + "rollout.topP": 0.9, _C + ".oldLogprobs": "Rollout"}),
    ],
    "Training.groupSize": [
        Bad(_T + "rollout.groupSize", {_T + "rollout.groupSize": 1}),
        Bad(_T + "rollout.groupSize", {_T + "rollout.groupSize": 1, _T + "algorithm.type": "DrGRPO"}),
        Bad(_T + "rollout.groupSize", {_T + "rollout.groupSize": 1, _T + "algorithm.loss": _FUNCTION}),
        Bad(_T + "rollout.groupSize", {_T + "rollout.groupSize": 1, _T + "algorithm.type": "RLOO"}),
        *(
            Bad(_T + "rollout.groupSize", {_T + "rollout.groupSize": 1, _T + "algorithm.advantage.type": each})
            for each in (*_COMPARING, "OptimalTokenBaseline")
        ),
    ],
    "Training.dropZeroVarianceGroups": [
        Bad(
            _T + "algorithm.dropZeroVarianceGroups",
            {
                _T + "algorithm": {"dropZeroVarianceGroups": True, "advantage": _FUNCTION},
                _T + "rollout.groupSize": 1,
            },
        ),
    ],
}
