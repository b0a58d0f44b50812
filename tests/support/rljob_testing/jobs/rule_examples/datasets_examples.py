"""Examples for the rules on `training.datasets`; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.valid_job import REMOVED, Bad

_T = "spec.training."
_D = _T + "datasets"
_ONE = _T + "dataset"
_F = _T + "filters"
_REWARDS = {_T + "rewards": [{"type": "MathAnswer"}, {"name": "style", "type": "Format", "format": {"pattern": "x"}}]}
_FILE = {"type": "File", "file": {"path": "held_out.jsonl"}, "maxPromptTokens": 64}
_GAME = {"type": "Class", "classes": [{"path": "my_games:GuessNumber"}], "maxContextTokens": 256}


def _dataset(name: str, **fields: object) -> dict[str, object]:
    return {"name": name, "type": "File", "file": {"path": f"{name}.jsonl"}, "maxPromptTokens": 64, **fields}


GOOD: dict[str, list[Mapping[str, object]]] = {
    "Training.datasets": [{_ONE: REMOVED, _D: [_dataset("maths")]}, {_D: []}],
    "Training.datasets.name": [{_ONE: REMOVED, _D: [_dataset("maths", weight=0.7), _dataset("code", weight=0.3)]}],
    "Training.datasetRewards": [
        {_ONE: REMOVED, **_REWARDS, _D: [_dataset("a", rewards=["style"]), _dataset("b", rewards=["score", "style"])]},
        {_ONE: REMOVED, _T + "environment": _GAME, _D: [_dataset("a", rewards=["environment"])]},
    ],
    "Training.datasetRewardWeights": [
        {
            _ONE: REMOVED,
            _T + "rewards": [{"type": "MathAnswer", "weight": 0.0}, {"name": "b", "type": "MathAnswer"}],
            _D: [_dataset("a", rewards=["score", "b"])],
        }
    ],
    "Training.filters": [
        {_F: {"duplicates": "Drop"}},
        {_ONE: REMOVED, _D: [_dataset("a")], _F: {"duplicates": "Drop"}},
        {_ONE: REMOVED, _T + "environment": _GAME, _T + "rewards": REMOVED, _F: {"duplicates": "Keep"}},
    ],
    "Training.contamination": [{_F + ".contaminationNgramWords": 13, _T + "evaluations": [{"dataset": _FILE}]}],
    "NamedDataset.promptTemplate": [{_ONE: REMOVED, _D: [_dataset("a", promptTemplate="Question: {prompt}")]}],
}

BAD: dict[str, list[Bad]] = {
    "Training.datasets": [Bad(_D, {_D: [_dataset("maths")]})],
    "Training.datasets.name": [
        Bad(
            _D,
            {_ONE: REMOVED, _D: [_dataset("a"), _dataset("a", weight=2.0)]},
            places=(_D + "[0].name", _D + "[1].name"),
        )
    ],
    "Training.datasetRewards": [
        Bad(
            _D,
            {_ONE: REMOVED, **_REWARDS, _D: [_dataset("a"), _dataset("b", rewards=["score", "stile"])]},
            places=(_D + "[1].rewards[1]",),
        ),
        Bad(_D, {_ONE: REMOVED, _D: [_dataset("a", rewards=["environment"])]}, places=(_D + "[0].rewards[0]",)),
    ],
    "Training.datasetRewardWeights": [
        Bad(
            _D,
            {
                _ONE: REMOVED,
                _T + "rewards": [{"type": "MathAnswer", "weight": 0.0}, {"name": "b", "type": "MathAnswer"}],
                _D: [_dataset("b"), _dataset("a", rewards=["score"])],
            },
            places=(_D + "[1].rewards",),
        )
    ],
    "Training.filters": [
        Bad(
            _F,
            {
                _ONE: REMOVED,
                _T + "environment": _GAME,
                _T + "rewards": REMOVED,
                _F: {"contaminationNgramWords": 13},
                _T + "evaluations": [{}],
            },
        ),
        Bad(
            _F,
            {_ONE: REMOVED, _T + "environment": _GAME, _T + "rewards": REMOVED, _F: {"duplicates": "Drop"}},
        ),
    ],
    "Training.contamination": [Bad(_F + ".contaminationNgramWords", {_F: {"contaminationNgramWords": 13}})],
    "NamedDataset.promptTemplate": [
        Bad(_D + "[0].promptTemplate", {_ONE: REMOVED, _D: [_dataset("a", promptTemplate="Question:")]})
    ],
}
