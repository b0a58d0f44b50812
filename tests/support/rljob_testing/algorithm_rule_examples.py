"""The part of `rule_examples` about the learning rule."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.bad_job import Bad

_T = "spec.training."
_FUNCTION = {"type": "Function", "function": {"path": "mine:own"}}
_GROUP_RELATIVE: tuple[Mapping[str, object], ...] = (
    {"groupRelative": {}},
    {"type": "GroupRelative", "groupRelative": {"normalizeByStd": True}},
)
_CLIPPED: tuple[Mapping[str, object], ...] = (
    {"clipped": {}},
    {"type": "Clipped", "clipped": {"clipRatioHigh": 0.28}},
)

GOOD: dict[str, list[Mapping[str, object]]] = {
    "Advantage.function": [{_T + "algorithm.advantage": _FUNCTION}, {_T + "algorithm.advantage.type": "GroupRelative"}],
    "Loss.function": [{_T + "algorithm.loss": _FUNCTION}, {_T + "algorithm.loss.type": "Clipped"}],
    "Algorithm.advantage.groupRelative": [
        {_T + "algorithm": {"type": recipe, "advantage": advantage}}
        for recipe in ("GRPO", "DrGRPO")
        for advantage in _GROUP_RELATIVE
    ],
    "Algorithm.loss.clipped": [
        {_T + "algorithm": {"type": recipe, "loss": loss}} for recipe in ("GRPO", "DrGRPO") for loss in _CLIPPED
    ],
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
    "Kl.placement": [
        {_T + "algorithm.kl": {"coefficient": 0.1, "placement": "Reward"}},
        {_T + "algorithm.kl.placement": "Loss"},
    ],
    "Training.groupSize": [
        {_T + "rollout.groupSize": 2},
        {_T + "rollout.groupSize": 1, _T + "algorithm.advantage": _FUNCTION},
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
    "Advantage.function": [
        Bad(_T + "algorithm.advantage.function", {_T + "algorithm.advantage.type": "Function"}),
        Bad(_T + "algorithm.advantage.function", {_T + "algorithm.advantage.function": {"path": "mine:own"}}),
        Bad(
            _T + "algorithm.advantage.function",
            {_T + "algorithm.advantage": _FUNCTION | {"type": "GroupRelative"}},
        ),
    ],
    "Loss.function": [
        Bad(_T + "algorithm.loss.function", {_T + "algorithm.loss.type": "Function"}),
        Bad(_T + "algorithm.loss.function", {_T + "algorithm.loss.function": {"path": "mine:own"}}),
        Bad(_T + "algorithm.loss.function", {_T + "algorithm.loss": _FUNCTION | {"type": "Clipped"}}),
    ],
    "Algorithm.advantage.groupRelative": [
        Bad(_T + "algorithm.advantage.groupRelative", {_T + "algorithm.advantage": _FUNCTION | {"groupRelative": {}}}),
    ],
    "Algorithm.loss.clipped": [
        Bad(
            _T + "algorithm.loss.clipped",
            {_T + "algorithm": {"type": "DrGRPO", "loss": _FUNCTION | {"clipped": {"clipRatioLow": 0.1}}}},
        ),
    ],
    "Clipped.dualClipRatio": [
        Bad(_T + "algorithm.loss.clipped.dualClipRatio", {_T + "algorithm.loss.clipped.dualClipRatio": 1}),
        Bad(_T + "algorithm.loss.clipped.dualClipRatio", {_T + "algorithm.loss.clipped.dualClipRatio": 0.5}),
    ],
    "Kl.estimator": [Bad(_T + "algorithm.kl.estimator", {_T + "algorithm.kl.estimator": "K1"})],
    "Kl.placement": [
        Bad(_T + "algorithm.kl.placement", {_T + "algorithm.kl": {"coefficient": 0, "placement": "Reward"}})
    ],
    "Training.groupSize": [
        Bad(_T + "rollout.groupSize", {_T + "rollout.groupSize": 1}),
        Bad(_T + "rollout.groupSize", {_T + "rollout.groupSize": 1, _T + "algorithm.type": "DrGRPO"}),
        Bad(_T + "rollout.groupSize", {_T + "rollout.groupSize": 1, _T + "algorithm.loss": _FUNCTION}),
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
