"""Converts weights between the form in hub files and the form in a transformers model: other names, and fused tensors.

transformers has a conversion table for each model type, which `from_pretrained` and `save_pretrained` use. Here the
same table is applied to parts of a model: to what a rank reads for its shards, and to whole tensors for a rollout
engine or an export. A conversion applies to a group of tensors: for example, the experts of a layer are one tensor in
the model and several in files.
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
"""(name of a tensor in the files, window or None for all of it) -> the tensor."""

EXPERTS = ".experts."
"""The part of a name that is followed by an expert's number, in files, or by the name of a stacked tensor."""


@dataclass(frozen=True)
class FileGroup:
    """Tensors of the files that are converted together; or a single one, which is only renamed."""

    targets: tuple[str, ...]
    """Names of the resulting tensors in the model."""
    names: tuple[str, ...]
    """Names in the files."""
    converter: WeightConverter | None
    """None for a tensor that is only renamed."""
    patterns: tuple[str, ...]
    """The converter's source pattern for each of `names`."""

    @property
    def stacks_along_rows(self) -> bool:
        """Whether each tensor of the files goes into exactly one row (an expert) of the target, unchanged."""
        return self.converter is not None and _stacks_along_rows(self.converter)

    @property
    def num_rows(self) -> int:
        """Number of rows of a stacked target."""
        return len(self.names) // len(set(self.patterns))

    def load(self, model: PreTrainedModel, read: Read, windows: Mapping[str, Window]) -> dict[str, Tensor]:
        """Returns the model tensors of this group, each cut to its window, which may be empty. If all windows are
        empty, nothing is read, and the result is empty. Raises RuntimeError or ValueError if the tensors do not fit
        together."""
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
        # If the target is stacked, `load` has only read the rows of the window.
        return tensor[(slice(None), *window[1:])] if self.stacks_along_rows else tensor[window]


def file_groups(model: PreTrainedModel, file_names: Iterable[str], model_names: Iterable[str]) -> list[FileGroup]:
    """Groups the tensors of the files by the conversion to those of the model, as in `from_pretrained`. Tensors of the
    files that have no counterpart in `model_names` are left out."""
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
    """Returns the names of the tensors that transformers keeps in float32 in a 16-bit model, mostly those of
    routers."""
    patterns = model._keep_in_fp32_modules_strict or ()
    return frozenset(name for name in names if any(pattern in name for pattern in patterns))


def expert_endings(model: PreTrainedModel) -> frozenset[str]:
    """Returns the last parts of the names of expert layers in files, such as `gate_proj`; empty for a model whose
    experts are not converted."""
    converters = (each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter))
    patterns = (pattern for each in converters for pattern in each.source_patterns if "expert" in pattern)
    return frozenset(pattern.removesuffix("$").removesuffix(".weight").rpartition(".")[2] for pattern in patterns)


class HubNames:
    """Converts the tensors of a model back to the names and forms that its files have."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` may be on the meta device. The conversion table is stored in the model, so that it is created only
        once."""
        # Only a model that was loaded from files knows whether the names in them have the base model's prefix. Here
        # they always have it, so the table's change of the prefix is left out.
        transforms = [
            each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)
        ]
        model._weight_conversions = transforms
        self._model = model
        self._has_conversions = bool(transforms)
        reverse: list[WeightTransform] = [each.reverse_transform() for each in transforms[::-1]]
        self._renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
        self._converters = [each for each in reverse if isinstance(each, WeightConverter)]
        self._stacking = {
            target
            for each in transforms
            if isinstance(each, WeightConverter) and _stacks_along_rows(each)
            for target in each.target_patterns
        }
        """Patterns of the names of tensors that stack all experts of a layer."""

    def groups(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """Groups the names of the model's tensors that must be converted together; groups and names stay in the order
        of `names`."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self._group_of(name), []).append(name)
        return [tuple(each) for each in found.values()]

    def converted(self, group: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts all tensors of a group to the names and forms of the files. The results may share memory with the
        group."""
        if not self._has_conversions:
            return dict(group)
        return dict(revert_weight_conversion(self._model, dict(group)))

    def stream(
        self, weights: Iterable[tuple[str, Tensor]], names: Sequence[str], *, whole_experts: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors of `weights`, converted as soon as their group is complete. `names`: the names of all
        tensors in `weights`. `whole_experts`: see RolloutEngine.takes_whole_experts."""
        group_of = {name: group for group in self.groups(names) for name in group}
        whole = self._whole_experts(names) if whole_experts else {}
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in weights:
            if name in whole:
                yield whole[name], tensor
                continue
            group = group_of[name]
            members = waiting.setdefault(group, {})
            members[name] = tensor
            if len(members) == len(group):
                yield from self.converted(waiting.pop(group)).items()
        assert not waiting, f"incomplete groups of tensors: {sorted(waiting)}"

    def _group_of(self, name: str) -> str:
        return self._renamed(name)[0]

    def _whole_experts(self, names: Iterable[str]) -> dict[str, str]:
        """Of `names`, those of all experts of a layer in one tensor. Each with its name when it is sent whole: the path
        of the experts in files, and the end of the name in the model, such as `gate_up_proj`."""
        found = {}
        for name in names:
            renamed, pattern = self._renamed(name)
            if pattern in self._stacking:
                found[name] = f"{renamed.partition(EXPERTS)[0]}{EXPERTS}{name.rpartition('.')[2]}"
        return found

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """The name of a tensor's group, and the pattern of the converter that makes the group; None without one."""
        found: tuple[str, str | None] = rename_source_key(name, self._renamings, self._converters, reverse=True)
        return found


def _stacks_along_rows(converter: WeightConverter) -> bool:
    [stack, *others] = converter.operations
    return (isinstance(stack, MergeModulelist) and stack.dim == 0) and all(
        isinstance(each, Concatenate) and each.dim > 0 for each in others
    )


def _targets(first: str, converter: WeightConverter | None, known: Mapping[str, bool]) -> tuple[str, ...]:
    if converter is None:
        return (first,)
    [pattern, *others] = converter.target_patterns
    return tuple(name for name in (first, *(first.replace(pattern, other) for other in others)) if name in known)


def _only(value: Tensor | list[Tensor]) -> Tensor:
    return value[0] if isinstance(value, list) else value


def whole_window(shape: Sequence[int]) -> Window:
    """Returns the window that covers a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def _is_empty(window: Window) -> bool:
    return any(each.start == each.stop for each in window)
