"""Examples for unions, in which `type` selects the one block that may be present; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_testing.jobs.valid_job import REMOVED, Bad

_T = "spec.training."
_FUNCTION = {"path": "mine:own"}
_JUDGE = {"url": "http://judge/v1", "model": "m", "rubric": "Judge {response}", "pattern": "Score: (.*)"}


@dataclass(frozen=True)
class _Union:
    """One union and a path at which it occurs."""

    name: str
    path: str
    blocks: Mapping[str, tuple[str, object]]
    """For each type: the name of its block and a valid content of the block."""
    others: tuple[Mapping[str, object], ...] = ()
    """Valid objects of types that have no block."""
    beside: Mapping[str, object] = field(default_factory=dict)
    """Other edits that the job needs, by wire path."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Other fields of the union that are required."""

    def edits(self, content: Mapping[str, object]) -> Mapping[str, object]:
        """Edits that set the union to this content."""
        return {self.path: {**self.fields, **content}, **self.beside}

    def right(self) -> dict[str, Mapping[str, object]]:
        """For each type, a valid object with its block."""
        return {variant: {"type": variant, block: said} for variant, (block, said) in self.blocks.items()}


_UNIONS = (
    _Union(
        "Dataset",
        _T + "dataset",
        {
            "File": ("file", {"path": "train.jsonl"}),
            "HuggingFace": ("huggingFace", {"path": "owner/data"}),
            "ReasoningGym": ("reasoningGym", {"task": "basic_arithmetic"}),
        },
    ),
    _Union(
        "NamedDataset",
        _T + "datasets[0]",
        {
            "File": ("file", {"path": "train.jsonl"}),
            "HuggingFace": ("huggingFace", {"path": "owner/data"}),
            "ReasoningGym": ("reasoningGym", {"task": "basic_arithmetic"}),
        },
        fields={"name": "maths"},
        beside={_T + "dataset": REMOVED},
    ),
    _Union(
        "Reward",
        _T + "rewards[0]",
        {
            "Function": ("function", _FUNCTION),
            "Format": ("format", {"pattern": "a"}),
            "Overlong": ("overlong", {"bufferTokens": 16}),
            "RewardModel": ("rewardModel", {"source": "owner/reward"}),
            "Judge": ("judge", _JUDGE),
            "Remote": ("remote", {"url": "http://scores"}),
        },
        ({"type": "MathAnswer"},),
    ),
    _Union(
        "Environment",
        _T + "environment",
        {
            "Class": ("classes", [{"path": "my_games:Guess"}]),
            "Session": ("session", {"path": "my_agent:run"}),
        },
        beside={_T + "environment.maxContextTokens": 4096},
    ),
    _Union(
        "Advantage",
        _T + "algorithm.advantage",
        {"Function": ("function", _FUNCTION)},
        ({}, {"type": "GroupRelative"}),
    ),
    _Union(
        "Loss",
        _T + "algorithm.loss",
        {"Function": ("function", _FUNCTION), "DRO": ("dro", {"beta": 0.1})},
        ({}, {"type": "GPG"}),
    ),
    _Union(
        "KlController",
        _T + "algorithm.kl.controller",
        {"Adaptive": ("adaptive", {"target": 0.1})},
        ({}, {"type": "Fixed"}),
        {_T + "algorithm.kl.coefficient": 0.1},
    ),
    _Union(
        "Volume",
        "spec.volumes[0]",
        {
            "PersistentVolumeClaim": ("persistentVolumeClaim", {"claimName": "data"}),
            "ConfigMap": ("configMap", {"name": "data"}),
            "Secret": ("secret", {"name": "data"}),
            "EmptyDir": ("emptyDir", {}),
        },
        beside={"spec.volumes[0].name": "data", "spec.volumes[0].mountPath": "/data"},
    ),
)


def _good(union: _Union) -> dict[str, list[Mapping[str, object]]]:
    found: dict[str, list[Mapping[str, object]]] = {}
    for variant, (block, _) in union.blocks.items():
        found[f"{union.name}.{block}"] = [union.edits(union.right()[variant])]
        found[f"{union.name}.{block}Used"] = [union.edits(each) for each in (*union.others, *union.right().values())]
    return found


def _bad(union: _Union) -> dict[str, list[Bad]]:
    found: dict[str, list[Bad]] = {}
    for variant, (block, said) in union.blocks.items():
        place = f"{union.path}.{block}"
        others = [each for other, each in union.right().items() if other != variant]
        found[f"{union.name}.{block}"] = [Bad(place, union.edits({"type": variant}))]
        found[f"{union.name}.{block}Used"] = [
            Bad(place, union.edits({**each, block: said})) for each in (*union.others, *others)
        ]
    return found


GOOD: dict[str, list[Mapping[str, object]]] = {name: each for union in _UNIONS for name, each in _good(union).items()}
BAD: dict[str, list[Bad]] = {name: each for union in _UNIONS for name, each in _bad(union).items()}
