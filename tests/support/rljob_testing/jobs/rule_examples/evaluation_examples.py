"""Examples for the rules on evaluations, and between them and the training; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.valid_job import REMOVED, Bad

_T = "spec.training."
_R = _T + "rewards"
_V = _T + "evaluations"
_E = _T + "environment"
_K = "spec.checkpoint.everySteps"
_B = "spec.checkpoint.keepBest"
_FILE = {"type": "File", "file": {"path": "held_out.jsonl"}, "maxPromptTokens": 64}
_GYM = {"type": "ReasoningGym", "reasoningGym": {"task": "basic_arithmetic"}}
_GAME = {"type": "Class", "classes": [{"path": "my_games:GuessNumber"}], "maxContextTokens": 256}
_OVERLONG = {"name": "length", "type": "Overlong", "overlong": {"bufferTokens": 16}}
_ENVIRONMENT = {"type": "Environment"}
_ALONE: Mapping[str, object] = {_E: _GAME, _T + "dataset": REMOVED, _R: REMOVED}
"""An environment without dataset and rewards."""
_DISTILLATION: Mapping[str, object] = {
    _T + "algorithm.type": "Distillation",
    "spec.roles.ref.model": {"source": "owner/teacher"},
}

GOOD: dict[str, list[Mapping[str, object]]] = {
    "Evaluation.responses": [
        {_V: [{"dataset": _FILE, "numSamples": 0}]},
        {_V: [{"dataset": _FILE, "greedy": False, "numSamples": 4, "topP": 0.9}]},
    ],
    "Training.evaluations.name": [{_V: [{"dataset": _FILE}, {"name": "other", "dataset": _FILE}]}],
    "Training.evaluationDataset": [
        {**_ALONE, _V: [{"numPrompts": 8}]},
        {**_ALONE, _V: [{"dataset": _FILE}, {"name": "other"}]},
        {_E: _GAME, _V: [{"dataset": _FILE}]},
    ],
    "Training.evaluationsScored": [
        {_V: [{"dataset": _FILE}]},
        {**_ALONE, _V: [{"numPrompts": 8}]},
        {**_DISTILLATION, _R: []},
        {**_DISTILLATION, _R: [_OVERLONG | {"weight": 0.0}], _V: [{"dataset": _FILE}]},
    ],
    "Training.evaluationRewards": [
        {_V: [{"dataset": _FILE, "rewards": ["score"]}]},
        {_R + "[1]": _OVERLONG, _V: [{"dataset": _FILE, "rewards": ["length", "score"]}]},
        {**_ALONE, _V: [{"rewards": ["environment"]}]},
        {_E: _GAME, _V: [{"dataset": _FILE, "rewards": ["environment", "score"]}]},
    ],
    "Training.reasoningGymEvaluation": [
        {_T + "dataset": _GYM, _R: [{"type": "ReasoningGym"}], _V: [{"dataset": _GYM}]},
        {_T + "dataset": _GYM, _V: [{"dataset": _FILE}]},
        {
            _T + "dataset": _GYM,
            _R: [{"type": "ReasoningGym"}, _OVERLONG],
            _V: [{"dataset": _FILE, "rewards": ["length"]}],
        },
    ],
    "Training.evaluationNewTokens": [{_V: [{"dataset": _FILE, "maxNewTokens": 64}]}],
    "Training.syncEverySteps": [
        {_T + "rollout.syncEverySteps": 5, _V: [{"dataset": _FILE, "everySteps": each}], _K: 5} for each in (10, 0)
    ],
    "RLJobSpec.keepBestMetric": [
        {_V: [{"dataset": _FILE}, {"name": "b", "dataset": _FILE}], _B: {"metric": "eval/b/pass_at_1", "mode": "Min"}},
        {_V: [{"dataset": _FILE}], _B: {"metric": "eval/heldout/greedy", "count": 2}},
        *(
            {_V: [{"dataset": _FILE, "numSamples": 6}], _B: {"metric": f"eval/heldout/{metric}"}}
            for metric in ("pass_at_4", "pass_at_6", "mean_at_6", "maj_at_6", "response_length_mean")
        ),
    ],
}

BAD: dict[str, list[Bad]] = {
    "Evaluation.responses": [
        Bad(_V + "[0].numSamples", {_V: [{"dataset": _FILE, "greedy": False, "numSamples": 0}]}),
    ],
    "Training.evaluations.name": [
        Bad(_V, {_V: [{"dataset": _FILE}] * 2}, places=(_V + "[0].name", _V + "[1].name")),
    ],
    "Training.evaluationDataset": [
        Bad(_V, {_V: [{"dataset": _FILE}, {"name": "other"}]}, places=(_V + "[1].dataset",)),
        Bad(_V, {_E: _GAME, _V: [{"numPrompts": 8}]}, places=(_V + "[0].dataset",)),
    ],
    "Training.evaluationsScored": [Bad(_V, {**_DISTILLATION, _R: [], _V: [{"dataset": _FILE}]})],
    "Training.evaluationRewards": [
        Bad(_V, {_V: [{"dataset": _FILE, "rewards": ["score", "accuracy"]}]}, places=(_V + "[0].rewards[1]",)),
        Bad(_V, {_V: [{"dataset": _FILE, "rewards": ["environment"]}]}, places=(_V + "[0].rewards[0]",)),
        Bad(
            _V,
            {_E: _GAME, _R: [_ENVIRONMENT | {"name": "won"}], _V: [{"dataset": _FILE, "rewards": ["environment"]}]},
            places=(_V + "[0].rewards[0]",),
        ),
    ],
    "Training.reasoningGymEvaluation": [
        Bad(
            _V,
            {_T + "dataset": _GYM, _R: [_OVERLONG, {"type": "ReasoningGym"}], _V: [{"dataset": _FILE, **named}]},
            places=(_V + "[0].dataset.type",),
        )
        for named in ({}, {"rewards": ["score"]})
    ],
    "Training.evaluationNewTokens": [
        Bad(_V, {_V: [{"dataset": _FILE, "maxNewTokens": 65}]}, places=(_V + "[0].maxNewTokens",)),
    ],
    "Training.syncEverySteps": [
        Bad(
            _V,
            {_T + "rollout.syncEverySteps": 5, _V: [{"dataset": _FILE, "everySteps": 8}], _K: 5},
            places=(_V + "[0].everySteps",),
        ),
    ],
    "RLJobSpec.keepBestMetric": [
        Bad(_B + ".metric", {_V: [{"dataset": _FILE}], _B: {"metric": metric}})
        for metric in ("eval/other/greedy", "eval/held/pass_at_2", "eval/heldout2/greedy")
    ]
    + [Bad(_B + ".metric", {_B: {"metric": "eval/heldout/greedy"}})],
}
