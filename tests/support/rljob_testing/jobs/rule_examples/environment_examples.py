"""Examples for the rules on the environment of rollouts, and between it and the training; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.valid_job import REMOVED, Bad

_T = "spec.training."
_E = _T + "environment"
_R = _T + "rewards"
_GAME = {"path": "my_games:GuessNumber"}
_ENVIRONMENT = {"type": "Class", "classes": [_GAME], "maxContextTokens": 256}
_AGENT = {"type": "Session", "session": {"path": "my_agent:run"}, "maxContextTokens": 256}
_A = _T + "algorithm"
_REWARD = {"type": "Environment"}
_FUNCTION = {"type": "Function", "function": {"path": "rewards.mine:score"}}
_FILE = {"type": "File", "file": {"path": "held_out.jsonl"}, "maxPromptTokens": 64}
_ALONE: Mapping[str, object] = {_E: _ENVIRONMENT, _T + "dataset": REMOVED, _R: REMOVED}
"""An environment without dataset and rewards."""
_DISTILLATION: Mapping[str, object] = {
    _T + "algorithm.type": "Distillation",
    "spec.roles.ref.model": {"source": "owner/teacher"},
}

GOOD: dict[str, list[Mapping[str, object]]] = {
    "Environment.classes.name": [
        {_E: _ENVIRONMENT | {"classes": [_GAME, _GAME | {"name": "hard", "arguments": {"highest": 1000, "a": {}}}]}},
    ],
    "Environment.timeoutSeconds": [
        {_E: _ENVIRONMENT | {"timeoutSeconds": 0.5, "maxSeconds": 0.5}},
        {_E: _ENVIRONMENT | {"timeoutSeconds": 600}},
    ],
    "Training.dataset": [_ALONE, {_E: _ENVIRONMENT}],
    "Training.rewards": [{_E: _ENVIRONMENT, _R: []}, _ALONE, {_R: [_FUNCTION]}, {**_DISTILLATION, _R: []}],
    "Training.environmentReward": [
        {_E: _ENVIRONMENT, _R: [_REWARD]},
        {_E: _ENVIRONMENT, _R: [_REWARD | {"name": "won"}, _REWARD | {"name": "moves", "weight": -0.1}, _FUNCTION]},
    ],
    "Training.answers": [{_E: _ENVIRONMENT, _R: [{"type": "MathAnswer"}]}, {**_ALONE, _R: [_FUNCTION]}],
    "Training.environmentClasses": [_ALONE, {_E: _ENVIRONMENT | {"classes": [_GAME, _GAME | {"name": "hard"}]}}],
    "Training.environmentPromptTokens": [
        {_E: _ENVIRONMENT | {"maxContextTokens": 65}, _T + "rollout.maxNewTokens": 64},
        {**_ALONE, _E: _ENVIRONMENT | {"maxContextTokens": 2}, _T + "rollout.maxNewTokens": 1},
    ],
    "Training.environmentNewTokens": [{_E: _ENVIRONMENT, _T + "rollout.maxNewTokens": 255}],
    "Training.environmentGae": [
        {_E: _ENVIRONMENT | {"onRewrite": "NewRow"}},
        {_E: _ENVIRONMENT, _T + "algorithm.type": "PPO"},
        {**_ALONE, _E: _AGENT},
        {_E: _AGENT, _A: {"type": "PPO", "advantage": {"type": "GroupRelative"}}},
    ],
    "Training.environmentTurnTokens": [{_E: _ENVIRONMENT | {"maxTurnTokens": 64}}],
}

BAD: dict[str, list[Bad]] = {
    "Environment.classes.name": [
        Bad(
            _E + ".classes",
            {_E: _ENVIRONMENT | {"classes": [_GAME, _GAME | {"name": "hard"}, {"path": "my_games:Other"}]}},
            places=(_E + ".classes[0].name", _E + ".classes[2].name"),
        ),
    ],
    "Environment.timeoutSeconds": [
        Bad(_E + ".timeoutSeconds", {_E: _ENVIRONMENT | {"timeoutSeconds": 2.5, "maxSeconds": 2}}),
        Bad(_E + ".timeoutSeconds", {_E: _ENVIRONMENT | {"maxSeconds": 59.5}}),
    ],
    "Training.dataset": [
        Bad(_T + "dataset", {_T + "dataset": REMOVED, _R: [_FUNCTION]}),
        Bad(_T + "dataset", {_T + "dataset": REMOVED, _R: [_FUNCTION], _T + "evaluations": [{"dataset": _FILE}]}),
    ],
    "Training.rewards": [Bad(_R, {_R: []}), Bad(_R, {_R: REMOVED})],
    "Training.environmentReward": [
        Bad(_R, {_R: [_FUNCTION, _REWARD | {"name": "game"}]}, places=(_R + "[1].type",)),
    ],
    "Training.answers": [
        Bad(_R, {**_ALONE, _R: [_FUNCTION, {"name": "answer", "type": kind}]}, places=(_R + "[1].type",))
        for kind in ("MathAnswer", "Code")
    ],
    "Training.environmentClasses": [
        Bad(_E + ".classes", {**_ALONE, _E: _ENVIRONMENT | {"classes": [_GAME, _GAME | {"name": "hard"}]}}),
    ],
    "Training.environmentPromptTokens": [
        Bad(_E + ".maxContextTokens", {_E: _ENVIRONMENT | {"maxContextTokens": 64}, _T + "rollout.maxNewTokens": 63}),
        Bad(
            _E + ".maxContextTokens",
            {_E: _ENVIRONMENT, _T + "evaluations": [{"dataset": _FILE | {"maxPromptTokens": 256}}]},
        ),
    ],
    "Training.environmentNewTokens": [
        Bad(_T + "rollout.maxNewTokens", {_E: _ENVIRONMENT, _T + "rollout.maxNewTokens": 256}),
    ],
    "Training.environmentGae": [
        Bad(_E, {_E: _ENVIRONMENT | {"onRewrite": "NewRow"}, _T + "algorithm.type": "PPO"}),
        Bad(_E, {_E: _AGENT, _A: {"type": "PPO"}}),
        Bad(_E, {**_ALONE, _E: _AGENT, _A: {"advantage": {"type": "GAE"}}}),
    ],
    "Training.environmentTurnTokens": [
        Bad(_E + ".maxTurnTokens", {_E: _ENVIRONMENT | {"maxTurnTokens": 65}}),
    ],
}
