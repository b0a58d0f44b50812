"""What a cross-field rule is, and makers for the shapes of rule that occur more than once.

A rule is said twice, in Python and in CEL (the Common Expression Language, which the API server runs), with one text.
It stands on a type: wherever that type occurs in a job, the rule holds there, and the generated CRD carries it there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from rljob_api.base import WireModel
from rljob_api.scalars import MAX_DOMAIN, QUALIFIED_NAME
from rljob_api.variants import Variants, block_name, may_be_left_out

ContractT = TypeVar("ContractT", bound=WireModel)
VariantsT = TypeVar("VariantsT", bound=Variants)
Path = tuple[str | int, ...]

LOCAL_SOURCE = r"^(/|\./|\.\./|~|package://)"
"""A model or a dataset that is not on the hub."""
_OUTSIDE = r"^/|(^|/)\.\.(/|$)"

# Property names that CEL reserves; a schema's CEL spells them between double underscores.
_RESERVED = (
    *("as", "break", "const", "continue", "else", "false", "for", "function", "if", "import", "in", "let", "loop"),
    *("namespace", "null", "package", "return", "true", "var", "void", "while"),
)


def _at_the_field(_: WireModel) -> Sequence[Path]:
    return ((),)


def _no_choices(_: WireModel, __: Path) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Rule:
    """One rule on one type."""

    name: str
    on: type[WireModel]
    field: str
    """Where the fault is shown, from the object that the rule stands on: `.rollout.groupSize`; empty for itself."""
    cel: str
    wrong: str
    advice: str
    holds: Callable[[WireModel], bool]
    places: Callable[[WireModel], Sequence[Path]] = _at_the_field
    """Below `field`, where exactly the faults are; asked where the rule does not hold. The API server shows `field`."""
    choices: Callable[[WireModel, Path], Sequence[str]] = _no_choices
    """What may be written instead at one of the places, where that depends on the job; the API server prints the text
    without it."""
    is_about_secret: bool = False
    """Whether the value is a secret, which no message may show."""

    @property
    def message(self) -> str:
        """The text that the API server prints."""
        return f"{self.wrong}; {self.advice}"


@dataclass(frozen=True)
class Violation:
    """A rule that a job breaks."""

    rule: str
    path: Path
    wrong: str
    advice: str
    seen: str | None = None
    """The value at the path, if it is short."""

    @property
    def message(self) -> str:
        """What is wrong (value seen); what to do."""
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
    places: Callable[[ContractT], Sequence[Path]] = _at_the_field,
    choices: Callable[[ContractT, Path], Sequence[str]] = _no_choices,
    is_about_secret: bool = False,
) -> Rule:
    """A rule whose functions are typed by the type that it stands on."""
    return Rule(
        name=name,
        on=on,
        field=field,
        cel=cel,
        wrong=wrong,
        advice=advice,
        holds=lambda value: holds(_seen_as(on, value)),
        places=lambda value: places(_seen_as(on, value)),
        choices=lambda value, place: choices(_seen_as(on, value), place),
        is_about_secret=is_about_secret,
    )


def _seen_as(on: type[ContractT], value: WireModel) -> ContractT:
    assert isinstance(value, on)
    return value


def cel_property(name: str) -> str:
    """A property's name as CEL spells it."""
    return f"__{name}__" if name in _RESERVED else name


def wire_name(on: type[WireModel], field: str) -> str:
    """The camelCase name of a Python field."""
    alias = on.model_fields[field].alias
    assert alias is not None
    return alias


def union_rules(
    on: type[ContractT], blocks: Iterable[tuple[str, str, Callable[[ContractT], tuple[str | None, object]]]]
) -> tuple[Rule, ...]:
    """Kubernetes unions: `type`, where it is given, names the one block that is given. `blocks` are (value of type,
    Python name of the block, function that gives the object's type and that block)."""
    return tuple(make(on, *block) for block in blocks for make in (_has_block, _block_is_used))


def required_block_rules(part: type[VariantsT], variants: Iterable[StrEnum]) -> tuple[Rule, ...]:
    """Blocks with a field that has no default are there where their variant is chosen, and only there."""
    return union_rules(
        part,
        [
            (str(variant), block_name(variant), _reader(variant))
            for variant in variants
            if (kind := part.block_type(variant)) is not None and not may_be_left_out(kind)
        ],
    )


def _reader(variant: StrEnum) -> Callable[[Variants], tuple[str | None, object]]:
    """The type that a part gives, and the block of this variant."""
    return lambda part: (dict(part)["type"], part.block(variant))


def _has_block(
    on: type[ContractT], variant: str, field: str, read: Callable[[ContractT], tuple[str | None, object]]
) -> Rule:
    wire = wire_name(on, field)
    return rule(
        on,
        f"{on.__name__}.{wire}",
        field=f".{wire}",
        cel=f"!({_is_chosen_cel(on, variant)}) || has(self.{cel_property(wire)})",
        wrong=f"`type: {variant}` needs this block",
        advice="add it, or choose another type",
        holds=lambda value: read(value)[0] != variant or read(value)[1] is not None,
    )


def _block_is_used(
    on: type[ContractT], variant: str, field: str, read: Callable[[ContractT], tuple[str | None, object]]
) -> Rule:
    wire = wire_name(on, field)
    return rule(
        on,
        f"{on.__name__}.{wire}Used",
        field=f".{wire}",
        cel=f"!has(self.{cel_property(wire)}) || ({_is_chosen_cel(on, variant)})",
        wrong=f"is ignored, because `type` is not {variant}",
        advice=f"remove it, or write `type: {variant}`",
        holds=lambda value: read(value)[1] is None or read(value)[0] == variant,
    )


def _is_chosen_cel(on: type[WireModel], variant: str) -> str:
    is_chosen = f"self.type == '{variant}'"
    return is_chosen if on.model_fields["type"].is_required() else f"has(self.type) && {is_chosen}"


def exactly_one_rule(
    on: type[ContractT], fields: tuple[str, ...], read: Callable[[ContractT], tuple[object, ...]]
) -> Rule:
    """Exactly one of the fields is given. `read` gives their values, None for unset."""
    names = [wire_name(on, field) for field in fields]
    count = " + ".join(f"(has(self.{cel_property(name)}) ? 1 : 0)" for name in names)
    return rule(
        on,
        f"{on.__name__}.exactlyOne",
        field="",
        cel=f"{count} == 1",
        wrong="exactly one of " + ", ".join(f"`{name}`" for name in names) + " must be given",
        advice="write one of them and no other",
        holds=lambda value: sum(item is not None for item in read(value)) == 1,
    )


def unique_rule(
    on: type[ContractT],
    field: str,
    key: str,
    read: Callable[[ContractT], Sequence[str]],
    advice: str = "rename or remove one of them",
) -> Rule:
    """No two entries of a list share the key. `field` is the list's Python name, `key` the wire name of the key."""
    wire = wire_name(on, field)

    def places(value: ContractT) -> list[Path]:
        keys = read(value)
        return [(index, key) for index, each in enumerate(keys) if keys.count(each) > 1]

    return rule(
        on,
        f"{on.__name__}.{wire}.{key}",
        field=f".{wire}",
        cel=f"self.{wire}.all(a, self.{wire}.exists_one(b, b.{key} == a.{key}))",
        wrong=f"two entries have the same {key}",
        advice=advice,
        holds=lambda value: len(set(read(value))) == len(read(value)),
        places=places,
    )


def key_rule(
    on: type[ContractT], field: str, read: Callable[[ContractT], Mapping[str, str]], pattern: str = QUALIFIED_NAME
) -> Rule:
    """Each key of a map is a name, with or without a domain. Only a rule can look at keys in a CRD."""
    wire = wire_name(on, field)

    def places(value: ContractT) -> list[Path]:
        return [(key,) for key in read(value) if re.fullmatch(pattern, key) is None or key.find("/") > MAX_DOMAIN]

    return rule(
        on,
        f"{on.__name__}.{wire}Keys",
        field=f".{wire}",
        cel=(
            f"!has(self.{wire}) || self.{wire}.all(k, k.matches({cel_text(pattern)}) && k.indexOf('/') <= {MAX_DOMAIN})"
        ),
        wrong="has an invalid key",
        advice="write such as team or example.com/team, at most 63 characters after the domain",
        holds=lambda value: not places(value),
        places=places,
    )


def revision_rule(on: type[ContractT], field: str, read: Callable[[ContractT], tuple[str, str | None]]) -> Rule:
    """A revision belongs to a repository of the hub. `read` gives the source and the revision."""

    def holds(value: ContractT) -> bool:
        source, revision = read(value)
        return revision is None or re.search(LOCAL_SOURCE, source) is None

    return rule(
        on,
        f"{on.__name__}.revision",
        field=".revision",
        cel=f"!has(self.revision) || !self.{field}.matches({cel_text(LOCAL_SOURCE)})",
        wrong=f"a revision needs a Hugging Face repository, but {field} is a local path",
        advice="remove the revision",
        holds=holds,
    )


def sub_path_rule(on: type[ContractT], read: Callable[[ContractT], str | None]) -> Rule:
    """A folder within a volume."""
    return rule(
        on,
        f"{on.__name__}.subPath",
        field=".subPath",
        cel=f"!has(self.subPath) || !self.subPath.matches({cel_text(_OUTSIDE)})",
        wrong="must stay within the volume",
        advice="write a relative path without '..'",
        holds=lambda value: re.search(_OUTSIDE, read(value) or "") is None,
    )


def cel_text(text: str) -> str:
    """A raw CEL string literal, as regular expressions are best written."""
    assert "'" not in text
    return f"r'{text}'"


def starts_with_none_cel(subject: str, prefixes: tuple[str, ...]) -> str:
    """CEL: whether a text begins with none of these."""
    return " && ".join(f"!{subject}.startsWith('{prefix}')" for prefix in prefixes)
