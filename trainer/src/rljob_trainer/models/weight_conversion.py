"""Weights as files on the hub have them, and as a model of transformers has them: other names, and fused tensors.

transformers knows the way for each type of model, and goes it in `from_pretrained` and `save_pretrained`. Here the same
table is applied to parts of a model: to what a rank reads of its shards, and to whole tensors that go to a rollout
engine or an export. A conversion is of a group of tensors: the experts of a layer are one tensor in the model and
several in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

Window = tuple[slice, ...]
"""The part of a whole tensor that a rank holds, one slice for each dimension."""
Read = Callable[[str, Window | None], Tensor]
"""A tensor of the files, or a window of it."""


@dataclass(frozen=True)
class FileGroup:
    """What becomes of some tensors of the files: of one, renamed at most, or of several that are converted together."""

    targets: tuple[str, ...]
    """The tensors of the model."""
    names: tuple[str, ...]
    """In the files."""
    converter: WeightConverter | None
    patterns: tuple[str, ...]
    """Of the converter, for each of `names`."""

    @property
    def stacks_along_rows(self) -> bool:
        """Whether each tensor of the files becomes one row (an expert) of the target, whole and unmixed."""
        if self.converter is None:
            return False
        [stack, *others] = self.converter.operations
        return (isinstance(stack, MergeModulelist) and stack.dim == 0) and all(
            isinstance(each, Concatenate) and each.dim > 0 for each in others
        )

    @property
    def num_rows(self) -> int:
        """Rows of a target that is stacked."""
        return len(self.names) // len(set(self.patterns))

    def load(self, model: PreTrainedModel, read: Read, windows: Mapping[str, Window]) -> dict[str, Tensor]:
        """The tensors of the model that this group makes, each cut to its window, which may be empty. Nothing is read
        where a rank holds nothing of them. Raises RuntimeError and ValueError for tensors that do not fit together."""
        if all(_is_empty(windows[name]) for name in self.targets):
            return {}
        [first, *_] = self.targets
        if self.converter is None:
            return {first: read(self.names[0], windows[first])}
        rows = windows[first][0] if self.stacks_along_rows else slice(0, self.num_rows)
        converter = deepcopy(self.converter)
        seen: dict[str, int] = {}
        for name, pattern in zip(self.names, self.patterns, strict=True):
            row = seen[pattern] = seen.get(pattern, -1) + 1
            if rows.start <= row < rows.stop:
                converter.add_tensor(first, name, pattern, read(name, None))
        found = converter.convert(first, model=model, config=model.config)
        return {name: self._cut(_only(found[name]), windows[name]) for name in self.targets}

    def _cut(self, tensor: Tensor, window: Window) -> Tensor:
        return tensor[(slice(None), *window[1:])] if self.stacks_along_rows else tensor[window]


def file_groups(model: PreTrainedModel, file_names: Iterable[str], model_names: Iterable[str]) -> list[FileGroup]:
    """How the tensors of the files become those of the model, as in `from_pretrained`. What the model does not have is
    left out."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = dict.fromkeys(model_names, True)
    sources: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(file_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target in known:
            sources.setdefault(target, []).append((name, pattern))
    return [
        FileGroup(
            _targets(target, None if found[0][1] is None else by_pattern[found[0][1]], known),
            tuple(name for name, _ in found),
            None if found[0][1] is None else by_pattern[found[0][1]],
            tuple(pattern for _, pattern in found if pattern is not None),
        )
        for target, found in sources.items()
    ]


def float32_names(model: PreTrainedModel, names: Iterable[str]) -> frozenset[str]:
    """The tensors that transformers keeps in 32 bits where all others have 16: mostly what routers choose by."""
    patterns = model._keep_in_fp32_modules_strict or ()
    return frozenset(name for name in names if any(pattern in name for pattern in patterns))


def expert_endings(model: PreTrainedModel) -> frozenset[str]:
    """Last names of the layers of experts in files, such as `gate_proj`; none for a model without conversions."""
    converters = (each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter))
    patterns = (pattern for each in converters for pattern in each.source_patterns if "expert" in pattern)
    return frozenset(pattern.removesuffix("$").removesuffix(".weight").rpartition(".")[2] for pattern in patterns)


class HubNames:
    """The way back, from the tensors of a model to those of its files."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` may be on the meta device; it keeps its table, so that it is not made anew for every tensor."""
        # A model that was not loaded from files does not know whether those have its base model's prefix: they have.
        transforms = [
            each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)
        ]
        model._weight_conversions = transforms
        self._model = model
        self._has_conversions = bool(transforms)
        reverse: list[WeightTransform] = [each.reverse_transform() for each in transforms[::-1]]
        self._renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
        self._converters = [each for each in reverse if isinstance(each, WeightConverter)]

    def groups(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """The tensors of the model that have to be converted together, in their order."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self._group_of(name), []).append(name)
        return [tuple(each) for each in found.values()]

    def converted(self, group: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors of a group under the names and in the forms of the files; they may share memory with it."""
        if not self._has_conversions:
            return dict(group)
        return dict(revert_weight_conversion(self._model, dict(group)))

    def stream(self, weights: Iterable[tuple[str, Tensor]], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """All tensors of `weights`, whose names are `names`, converted as soon as their group is complete."""
        group_of = {name: group for group in self.groups(names) for name in group}
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in weights:
            group = group_of[name]
            members = waiting.setdefault(group, {})
            members[name] = tensor
            if len(members) == len(group):
                yield from self.converted(waiting.pop(group)).items()
        assert not waiting, f"tensors without the others of their group: {sorted(waiting)}"

    def _group_of(self, name: str) -> str:
        renamed: str
        renamed, _ = rename_source_key(name, self._renamings, self._converters, reverse=True)
        return renamed


def _targets(first: str, converter: WeightConverter | None, known: Mapping[str, bool]) -> tuple[str, ...]:
    if converter is None:
        return (first,)
    [pattern, *others] = converter.target_patterns
    return tuple(name for name in (first, *(first.replace(pattern, other) for other in others)) if name in known)


def _only(value: Tensor | list[Tensor]) -> Tensor:
    return value[0] if isinstance(value, list) else value


def whole_window(shape: Sequence[int]) -> Window:
    """All of a tensor."""
    return tuple(slice(0, size) for size in shape)


def _is_empty(window: Window) -> bool:
    return any(each.start == each.stop for each in window)
