"""`Rule`, a validation rule across fields, and functions that create common rules.

A rule has two forms, a Python predicate and a CEL expression (Common Expression Language, which the API server runs),
and one message. It belongs to a type: it applies wherever that type occurs in a job, and in the generated CRD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from rljob_api.base import WireModel
from rljob_api.scalars import MAX_DOMAIN, QUALIFIED_NAME
from rljob_api.variants import Variants, block_name, is_optional_block

ContractT = TypeVar("ContractT", bound=WireModel)
VariantsT = TypeVar("VariantsT", bound=Variants)
Path = tuple[str | int, ...]

LOCAL_SOURCE = r"^(/|\./|\.\./|~|package://|run://)"
"""Sources of models and datasets that are not repositories of the Hugging Face Hub."""
_PATH_OUTSIDE_FOLDER = r"^/|(^|/)\.\.(/|$)"
"""Paths that are absolute or contain `..`."""

# Property names that CEL reserves; in a CRD's CEL they are written between double underscores.
_RESERVED = (
    *("as", "break", "const", "continue", "else", "false", "for", "function", "if", "import", "in", "let", "loop"),
    *("namespace", "null", "package", "return", "true", "var", "void", "while"),
)


def _at_the_field(_: WireModel) -> Sequence[Path]:
    return ((),)


def _no_details(_: WireModel, __: Path) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Rule:
    """One rule on one type."""

    name: str
    """Unique name, such as `Training.groupSize`."""
    on: type[WireModel]
    """The type to whose values the rule applies."""
    field: str
    """Path of the reported field, relative to a value of `on`: `.rollout.groupSize`; empty for the value itself."""
    cel: str
    wrong: str
    """First part of the message: what is wrong, as a predicate of the field, such as `must divide batchSize`."""
    advice: str
    """Second part of the message: how to fix it, such as `choose a divisor of batchSize`."""
    holds: Callable[[WireModel], bool]
    fault_paths: Callable[[WireModel], Sequence[Path]] = _at_the_field
    """Exact paths of the faults, relative to `field`, for a value that breaks the rule. The API server reports only
    `field`."""
    details: Callable[[WireModel, Path], Sequence[str]] = _no_details
    """What the message adds in parentheses, for one of the `fault_paths`: for example the valid values, or the numbers
    of the job. The API server's messages do not have it."""
    is_about_secret: bool = False
    """Whether the value is a secret, which no message may show."""
    is_about_key: bool = False
    """Whether the fault is a key of a map, which the message then shows instead of its value."""

    @property
    def message(self) -> str:
        """The message of the API server."""
        return f"{self.wrong}; {self.advice}"


@dataclass(frozen=True)
class Violation:
    """One fault of a job, or one warning: its rule and its path."""

    rule: str
    """Name of the rule."""
    path: Path
    wrong: str
    advice: str
    seen: str | None = None
    """The value at the path, or the key if the rule is about keys; None if it is a secret, missing, a list or mapping,
    or too long to show."""

    @property
    def message(self) -> str:
        """`what is wrong (seen: value); how to fix it`."""
        shown = f" (seen: {self.seen})" if self.seen is not None else ""
        return f"{self.wrong}{shown}; {self.advice}"


def rule(
    on: type[ContractT],
    name: str,
    *,
    field: str,
    cel: str,
    wrong: str,
    advice: str,
    holds: Callable[[ContractT], bool],
    fault_paths: Callable[[ContractT], Sequence[Path]] = _at_the_field,
    details: Callable[[ContractT, Path], Sequence[str]] = _no_details,
    is_about_secret: bool = False,
    is_about_key: bool = False,
) -> Rule:
    """Creates a rule whose functions take values of the type `on`; see `Rule` for the arguments."""
    return Rule(
        name=name,
        on=on,
        field=field,
        cel=cel,
        wrong=wrong,
        advice=advice,
        holds=lambda value: holds(_checked_type(on, value)),
        fault_paths=lambda value: fault_paths(_checked_type(on, value)),
        details=lambda value, path: details(_checked_type(on, value), path),
        is_about_secret=is_about_secret,
        is_about_key=is_about_key,
    )


def _checked_type(on: type[ContractT], value: WireModel) -> ContractT:
    assert isinstance(value, on)
    return value


def cel_property(name: str) -> str:
    """A property's name as CEL spells it."""
    return f"__{name}__" if name in _RESERVED else name


def wire_name(on: type[WireModel], field: str) -> str:
    """The camelCase name of a field; `field` is its Python name."""
    alias = on.model_fields[field].alias
    assert alias is not None
    return alias


def union_rules(
    on: type[ContractT], blocks: Iterable[tuple[str, str, Callable[[ContractT], tuple[str | None, object]]]]
) -> tuple[Rule, ...]:
    """The rules of a class whose field `type` selects at most one block (a Kubernetes union): that block is set, and no
    other.

    Args:
        blocks: for each block the value of `type` that selects it, the block's Python name, and a function that returns
            `type` and this block of a value, for example
            `("File", "file", lambda dataset: (dataset.type, dataset.file))`.
    """
    return tuple(make(on, *block) for block in blocks for make in (_selected_block_rule, other_block_rule))


def required_block_rules(part: type[VariantsT], variants: Iterable[StrEnum]) -> tuple[Rule, ...]:
    """The rules that a block with a required field is set if and only if its variant is chosen."""
    return union_rules(
        part,
        [
            (str(variant), block_name(variant), _reader(variant))
            for variant in variants
            if (kind := part.block_type(variant)) is not None and not is_optional_block(kind)
        ],
    )


def _reader(variant: StrEnum) -> Callable[[Variants], tuple[str | None, object]]:
    """A function that returns a part's `type` and its block for this variant."""
    return lambda part: (dict(part)["type"], part.block(variant))


def _selected_block_rule(
    on: type[ContractT], variant: str, field: str, read: Callable[[ContractT], tuple[str | None, object]]
) -> Rule:
    """The rule that a block is set if `type` selects it."""
    wire = wire_name(on, field)
    return rule(
        on,
        f"{on.__name__}.{wire}",
        field=f".{wire}",
        cel=f"{_is_other_cel(on, variant)} || has(self.{cel_property(wire)})",
        wrong=f"is required with type {variant}",
        advice="add it, or choose another type",
        holds=lambda value: read(value)[0] != variant or read(value)[1] is not None,
    )


def other_block_rule(
    on: type[ContractT], variant: str, field: str, read: Callable[[ContractT], tuple[str | None, object]]
) -> Rule:
    """The rule that a block is not set if `type` does not select it. Alone, without `union_rules`, it is for a block
    that may be unset."""
    wire = wire_name(on, field)
    return rule(
        on,
        f"{on.__name__}.{wire}Used",
        field=f".{wire}",
        cel=f"!has(self.{cel_property(wire)}) || {_is_chosen_cel(on, variant)}",
        wrong=f"would be ignored, because type is not {variant}",
        advice=f"remove it, or set type: {variant}",
        holds=lambda value: read(value)[1] is None or read(value)[0] == variant,
    )


def _is_chosen_cel(on: type[WireModel], variant: str) -> str:
    """CEL for whether `type` is set to the variant."""
    is_chosen = f"self.type == '{variant}'"
    return is_chosen if on.model_fields["type"].is_required() else f"has(self.type) && {is_chosen}"


def _is_other_cel(on: type[WireModel], variant: str) -> str:
    """CEL for whether `type` is unset, or set to another variant."""
    is_other = f"self.type != '{variant}'"
    return is_other if on.model_fields["type"].is_required() else f"!has(self.type) || {is_other}"


def exactly_one_rule(
    on: type[ContractT], fields: tuple[str, ...], read: Callable[[ContractT], tuple[object, ...]]
) -> Rule:
    """The rule that exactly one of the fields is set. `read` returns their values, None for unset fields."""
    names = [wire_name(on, field) for field in fields]
    count = " + ".join(f"(has(self.{cel_property(name)}) ? 1 : 0)" for name in names)
    return rule(
        on,
        f"{on.__name__}.exactlyOne",
        field="",
        cel=f"{count} == 1",
        wrong="exactly one of " + ", ".join(f"`{name}`" for name in names) + " must be set",
        advice="set one of them, and remove the others",
        holds=lambda value: sum(item is not None for item in read(value)) == 1,
    )


def unique_rule(
    on: type[ContractT],
    field: str,
    key: str,
    read: Callable[[ContractT], Sequence[str]],
    advice: str = "rename or remove one of them",
) -> Rule:
    """The rule that no two entries of a list have the same key. `field` is the Python name of the list, `key` the wire
    name of the key; `read` returns the key of each entry."""
    wire = wire_name(on, field)
    is_unset = f"!has(self.{wire}) || " if on.model_fields[field].default is None else ""

    def fault_paths(value: ContractT) -> list[Path]:
        keys = read(value)
        return [(index, key) for index, each in enumerate(keys) if keys.count(each) > 1]

    return rule(
        on,
        f"{on.__name__}.{wire}.{key}",
        field=f".{wire}",
        cel=f"{is_unset}self.{wire}.all(a, self.{wire}.exists_one(b, b.{key} == a.{key}))",
        wrong=f"two entries have the same {key}",
        advice=advice,
        holds=lambda value: len(set(read(value))) == len(read(value)),
        fault_paths=fault_paths,
    )


def key_rule(
    on: type[ContractT], field: str, read: Callable[[ContractT], Mapping[str, str]], pattern: str = QUALIFIED_NAME
) -> Rule:
    """The rule that each key of a map matches a pattern (by default the pattern of label keys). A schema in a CRD
    cannot restrict keys, so this needs a rule."""
    wire = wire_name(on, field)

    def fault_paths(value: ContractT) -> list[Path]:
        return [(key,) for key in read(value) if re.fullmatch(pattern, key) is None or key.find("/") > MAX_DOMAIN]

    return rule(
        on,
        f"{on.__name__}.{wire}Keys",
        field=f".{wire}",
        cel=f"self.{wire}.all(k, k.matches({cel_text(pattern)}) && k.indexOf('/') <= {MAX_DOMAIN})",
        wrong="invalid key",
        advice="use a name of at most 63 characters, with or without a domain (team, example.com/team)",
        holds=lambda value: not fault_paths(value),
        fault_paths=fault_paths,
        is_about_key=True,
    )


def revision_rule(on: type[ContractT], field: str, read: Callable[[ContractT], tuple[str, str | None]]) -> Rule:
    """The rule that a revision is set only for a repository of the Hugging Face Hub. `field` is the wire name of the
    source; `read` returns the source and the revision."""

    def holds(value: ContractT) -> bool:
        source, revision = read(value)
        return revision is None or re.search(LOCAL_SOURCE, source) is None

    return rule(
        on,
        f"{on.__name__}.revision",
        field=".revision",
        cel=f"!has(self.revision) || !self.{field}.matches({cel_text(LOCAL_SOURCE)})",
        wrong=f"requires a Hugging Face repository, but {field} is a local path",
        advice="remove the revision",
        holds=holds,
    )


def sub_path_rule(on: type[ContractT], read: Callable[[ContractT], str | None]) -> Rule:
    """The rule that `subPath`, if it is set, is a relative path without `..`."""
    return rule(
        on,
        f"{on.__name__}.subPath",
        field=".subPath",
        cel=f"!has(self.subPath) || !self.subPath.matches({cel_text(_PATH_OUTSIDE_FOLDER)})",
        wrong="must be a relative path within the volume",
        advice="remove the leading '/' and all '..'",
        holds=lambda value: re.search(_PATH_OUTSIDE_FOLDER, read(value) or "") is None,
    )


def cel_text(text: str) -> str:
    """A raw CEL string literal, for example of a regular expression."""
    assert "'" not in text
    return f"r'{text}'"


def starts_with_none_cel(subject: str, prefixes: tuple[str, ...]) -> str:
    """CEL for whether a string starts with none of these prefixes."""
    return " && ".join(f"!{subject}.startsWith('{prefix}')" for prefix in prefixes)
