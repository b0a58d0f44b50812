"""Examples for the rules on rewards; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.valid_job import REMOVED, Bad

_T = "spec.training."
_R = _T + "rewards"
_GYM = {"type": "ReasoningGym", "reasoningGym": {"task": "basic_arithmetic"}}
_FUNCTION = {"type": "Function", "function": {"path": "rewards.mine:score"}}
_FORMAT = {"type": "Format", "format": {"pattern": "<answer>.*</answer>"}}
_OVERLONG = {"name": "length", "type": "Overlong", "overlong": {"bufferTokens": 16}}
_MODEL = {"type": "RewardModel", "rewardModel": {"source": "owner/reward"}}
_ENVIRONMENT = {"type": "Environment"}
_E = _T + "environment"
_GAME = {"type": "Class", "classes": [{"path": "my_games:GuessNumber"}], "maxContextTokens": 256}
_DISTILLATION: Mapping[str, object] = {
    _T + "algorithm.type": "Distillation",
    "spec.roles.ref.model": {"source": "owner/teacher"},
}


def _two_tasks(rewards_of_first: list[str], rewards_of_second: list[str]) -> Mapping[str, object]:
    """Two datasets of ReasoningGym, with two rewards of this type and one of another type."""
    return {
        _T + "dataset": REMOVED,
        _T + "datasets": [
            _GYM | {"name": "a", "rewards": rewards_of_first},
            _GYM | {"name": "b", "rewards": rewards_of_second},
        ],
        _R: [{"name": name, "type": "ReasoningGym"} for name in ("first", "second")] + [_OVERLONG],
    }


GOOD: dict[str, list[Mapping[str, object]]] = {
    "Reward.codeUsed": [
        {_R: [{"type": "Code"}]},
        {_R: [{"type": "Code", "code": {"score": "Fraction", "memory": "512Mi"}}]},
    ],
    "Reward.limits": [
        {_R: [_OVERLONG | {"weight": 0.5}]},
        {_E: _GAME, _R: [_ENVIRONMENT | {"timeoutSeconds": 10}]},
        {_R: [_FORMAT | {"timeoutSeconds": 1.0, "numProcesses": 1}]},
    ],
    "Reward.failures": [
        {_R: [_OVERLONG | {"onTimeout": "Score", "onError": "Fail"}]},
        {_R: [_FORMAT | {"onError": "Score", "onTimeout": "Fail", "errorScore": -1.0}]},
        {_E: _GAME, _R: [_ENVIRONMENT | {"onError": "Exclude", "onTimeout": "Score", "errorScore": -1.0}]},
    ],
    "Reward.errorScore": [
        {_R: [_FUNCTION | {"onTimeout": "Score", "errorScore": -1.0}]},
        {_R: [_FUNCTION | {"onError": "Exclude", "onTimeout": "Exclude", "errorScore": 0.0}]},
    ],
    "Training.rewards.name": [
        {_R: [{"type": "MathAnswer"}, _FUNCTION | {"name": "style"}, _OVERLONG]},
        {_R: [_FUNCTION | {"name": "a"}, _FUNCTION | {"name": "A"}]},
    ],
    "Training.rewardWeights": [
        {_R: [_FUNCTION | {"weight": 0.0}, _OVERLONG]},
        {_R: [_FUNCTION | {"weight": 1.0}, _FORMAT | {"name": "format", "weight": -1.0}]},
        # The environment's own reward is added with weight 1.
        {_E: _GAME, _R: [_FUNCTION | {"weight": 0.0}]},
        {_E: _GAME, _R: []},
        {**_DISTILLATION, _R: [_FUNCTION | {"weight": 0.0}]},
    ],
    "Training.overlongBuffer": [{_R: [_OVERLONG | {"overlong": {"bufferTokens": 64}}]}],
    "Training.reasoningGymReward": [
        {_T + "dataset": _GYM, _R: [{"type": "ReasoningGym"}]},
        {_T + "dataset": _GYM, _R: [_OVERLONG, {"type": "ReasoningGym"}]},
        _two_tasks(["first"], ["second", "length"]),
        _two_tasks(["first"], ["length"]),
    ],
}

BAD: dict[str, list[Bad]] = {
    "Reward.codeUsed": [Bad(_R + "[0].code", {_R: [{"type": "MathAnswer", "code": {"maxTests": 5}}]})],
    "Reward.limits": [
        Bad(_R + "[0]", {_R: [reward | {name: value}]})
        for name, value in (("timeoutSeconds", 9.0), ("numProcesses", 1))
        for reward in (_OVERLONG, _MODEL)
    ]
    + [Bad(_R + "[0]", {_E: _GAME, _R: [_ENVIRONMENT | {"numProcesses": 4}]})],
    "Reward.failures": [
        Bad(_R + "[0]", {_R: [reward | {name: value}]})
        for name, value in (("onError", "Score"), ("onTimeout", "Fail"), ("errorScore", -1.0))
        for reward in (_OVERLONG, _MODEL)
    ],
    "Reward.errorScore": [
        Bad(_R + "[0].errorScore", {_R: [_FUNCTION | {"errorScore": -1.0, **policies}]})
        for policies in ({}, {"onError": "Exclude", "onTimeout": "Fail"})
    ]
    + [Bad(_R + "[0].errorScore", {_E: _GAME, _R: [_ENVIRONMENT | {"errorScore": -1.0}]})],
    "Training.rewards.name": [
        Bad(_R, {_R + "[1]": _FUNCTION}, places=(_R + "[0].name", _R + "[1].name")),
        Bad(_R, {_R: [_FORMAT, _OVERLONG, _FORMAT]}, places=(_R + "[0].name", _R + "[2].name")),
    ],
    "Training.rewardWeights": [
        Bad(_R, {_R + "[0].weight": 0.0}),
        Bad(_R, {_R: [_FUNCTION | {"weight": 0.0}, _OVERLONG | {"weight": -0.0}]}),
        Bad(_R, {_E: _GAME, _R: [_ENVIRONMENT | {"weight": 0.0}]}),
    ],
    "Training.overlongBuffer": [
        Bad(
            _R,
            {_R: [{"type": "MathAnswer"}, _OVERLONG | {"overlong": {"bufferTokens": 65}}]},
            places=(_R + "[1].overlong.bufferTokens",),
        ),
        Bad(_R, {_R: [_OVERLONG], _T + "rollout.maxNewTokens": 15}, places=(_R + "[0].overlong.bufferTokens",)),
    ],
    "Training.reasoningGymReward": [
        Bad(_R, {_R + "[0].type": "ReasoningGym"}),
        Bad(_R, {_R + "[1]": {"name": "task", "type": "ReasoningGym"}}),
        Bad(_R, {_E: _GAME, _T + "dataset": REMOVED, _R: [{"type": "ReasoningGym"}]}),
        Bad(_R, _two_tasks([], ["second"])),
        Bad(_R, _two_tasks(["first"], ["first", "second"])),
    ],
}
