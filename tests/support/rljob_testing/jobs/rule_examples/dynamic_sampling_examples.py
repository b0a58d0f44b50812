"""Examples for the rules on dynamic sampling; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.valid_job import Bad

_A = "spec.training.algorithm"
_D = _A + ".dynamicSampling"
_SIZE = "spec.training.rollout.groupSize"
_FUNCTION = {"type": "Function", "function": {"path": "mine:own"}}
_PASS_AT_K = {"type": "GroupRelativePassAtK"}
_INCOMPLETE = "spec.training.onIncompleteGroup"
_OFF = {"enabled": False}
_MODEL = {"type": "RewardModel", "rewardModel": {"source": "org/reward"}}
_NOT_COMPARING = ("ReinforcePlusPlus", "ReMax", "PPO")

GOOD: dict[str, list[Mapping[str, object]]] = {
    "DynamicSampling.enabled": [
        {_D: {"maxRounds": 3, "onMaxRounds": "TrainOnFewer", "reward": "score"}},
        {_D: _OFF},
        {_A: {"type": "DAPO", "dynamicSampling": _OFF}},
        {_A: {"type": "DAPO", "dynamicSampling": {"maxRounds": 1}}},
    ],
    "Training.dynamicSamplingGroups": [
        {_A + ".type": "DAPO"},
        {_A: {"type": "DAPO", "advantage": {"type": "LeaveOneOut"}}},
        {_A: {"advantage": _FUNCTION, "dynamicSampling": {}}},
        {_A: {"type": "DAPO", "advantage": {"type": "GAE"}, "dynamicSampling": _OFF}},
        *({_A: {"type": each, "dynamicSampling": _OFF}} for each in _NOT_COMPARING),
    ],
    "Training.dynamicSamplingPassAtK": [{_A: {"type": "DAPO", "advantage": _PASS_AT_K, "dynamicSampling": _OFF}}],
    "Training.dropZeroVarianceGroupsCompared": [
        {_A: {"dropZeroVarianceGroups": True, "advantage": _PASS_AT_K}},
        {_A: {"type": "PPO", "dropZeroVarianceGroups": False}},
        {_A: {"type": "PPO", "dropZeroVarianceGroups": True, "advantage": _FUNCTION}},
    ],
    "Training.dynamicSamplingGroupSize": [
        {_D: {}, _SIZE: 2},
        {_A: {"type": "DAPO", "advantage": _FUNCTION, "dynamicSampling": _OFF}, _SIZE: 1},
    ],
    "Training.dynamicSamplingDrops": [
        {_A: {"type": "DAPO", "dropZeroVarianceGroups": True}},
        {_A: {"type": "DAPO", "dropZeroVarianceGroups": False, "dynamicSampling": _OFF}},
    ],
    "Training.dynamicSamplingReward": [
        {_D + ".reward": "score"},
        {
            _D + ".reward": "form",
            "spec.training.rewards": [{"name": each, "type": "MathAnswer"} for each in ("form", "b")],
        },
    ],
    "Training.dynamicSamplingRefill": [
        {_D + ".refill": "Continuous"},
        {_D + ".refill": "Round", "spec.training.rewards": [_MODEL]},
    ],
    "Training.onIncompleteGroup": [
        {_D + ".refill": "Round", _INCOMPLETE: "Refill"},
        {_D + ".refill": "Continuous", _INCOMPLETE: "TrainOnRest"},
        {_INCOMPLETE: "Refill"},
    ],
}

BAD: dict[str, list[Bad]] = {
    "DynamicSampling.enabled": [
        Bad(_D + ".enabled", {_D: _OFF | {name: value}})
        for name, value in (("maxRounds", 10), ("onMaxRounds", "Fail"), ("refill", "Round"), ("reward", "score"))
    ],
    "Training.dynamicSamplingGroups": [
        *(Bad(_D, {_A: {"type": each, "dynamicSampling": {}}}) for each in _NOT_COMPARING),
        Bad(_D, {_A: {"type": "DAPO", "advantage": {"type": "GAE"}}}),
        Bad(_D, {_A: {"advantage": {"type": "ReMax"}, "dynamicSampling": {"maxRounds": 2}}}),
    ],
    "Training.dynamicSamplingPassAtK": [
        Bad(_D, {_A: {"type": "DAPO", "advantage": _PASS_AT_K}}),
        Bad(_D, {_A: {"advantage": _PASS_AT_K, "dynamicSampling": {}}}),
    ],
    "Training.dropZeroVarianceGroupsCompared": [
        *(
            Bad(_A + ".dropZeroVarianceGroups", {_A: {"type": each, "dropZeroVarianceGroups": True}})
            for each in _NOT_COMPARING
        ),
        Bad(
            _A + ".dropZeroVarianceGroups",
            {_A: {"dropZeroVarianceGroups": True, "advantage": {"type": "ReMax"}}},
        ),
    ],
    "Training.dynamicSamplingGroupSize": [
        Bad(_D, {_A: {"type": "DAPO", "advantage": _FUNCTION}, _SIZE: 1}),
        Bad(_D, {_A: {"advantage": _FUNCTION, "dynamicSampling": {}}, _SIZE: 1}),
    ],
    "Training.dynamicSamplingDrops": [
        Bad(_A + ".dropZeroVarianceGroups", {_A: {"type": "DAPO", "dropZeroVarianceGroups": False}}),
        Bad(_A + ".dropZeroVarianceGroups", {_A: {"dynamicSampling": {}, "dropZeroVarianceGroups": False}}),
    ],
    "Training.dynamicSamplingReward": [
        Bad(_D + ".reward", {_D + ".reward": "accuracy"}),
        Bad(_D + ".reward", {_A: {"type": "DAPO", "dynamicSampling": {"reward": "accuracy"}}}),
    ],
    "Training.dynamicSamplingRefill": [
        Bad(_D + ".refill", {_D + ".refill": "Continuous", "spec.training.rewards": [_MODEL]}),
    ],
    "Training.onIncompleteGroup": [Bad(_INCOMPLETE, {_D + ".refill": "Continuous", _INCOMPLETE: "Refill"})],
}
