"""Requests and limits of a container, and the rules that the API server applies to them when it creates the pod."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.names import similar_names
from rljob_api.quantities import number_of
from rljob_api.rule import Path, Rule, cel_text, rule
from rljob_api.scalars import MAX_RESOURCE_DOMAIN, RESOURCE_WITH_DOMAIN, WITHOUT_NULLS, Quantity

ResourceMap = Annotated[dict[StrictStr, Quantity], Field(max_length=16), WITHOUT_NULLS]
COMMON_RESOURCES = ("cpu", "memory", "ephemeral-storage")
HUGE_PAGES = "hugepages-"
_BUILT_IN_NAMES = r"^(cpu|memory|ephemeral-storage|hugepages-[1-9][0-9]{0,9}([kMGTPE]|[KMGTPE]i)?)$"
_BUILT_IN_DOMAIN, QUOTA = "kubernetes.io/", "requests."
"""What the name of an extended resource must not contain, and what it must not start with."""
_MAX_DIGITS = 9
"""Largest number of digits in the amount of an extended resource. CEL cannot convert more than 18 digits into an
integer."""
_MAX_COUNT = 10**_MAX_DIGITS - 1
_ACCELERATOR = r"(?i)(gpu|npu|tpu)s?"
_PAGES = {"hugepages-2Mi": 2 * 2**20, "hugepages-1Gi": 2**30}
"""Sizes of huge pages whose multiples the CRD checks (x86-64). The operator checks all other sizes."""


class Resources(WireModel):
    """Requests and limits of the container, as in a pod. Set the number of GPUs in the pool's `gpusPerNode`, not
    here."""

    requests: ResourceMap = Field(default_factory=dict)
    """Amounts that the scheduler reserves, for example `{cpu: 16, memory: 128Gi}`."""
    limits: ResourceMap = Field(default_factory=dict)
    """Amounts that the container may not exceed, for example `{memory: 128Gi, rdma/hca: 1}`."""


def _is_extended(name: str) -> bool:
    """Whether the name is that of an extended resource: it has a domain."""
    return "/" in name


def is_resource_name(name: str) -> bool:
    """Whether a container can request a resource of this name."""
    return re.fullmatch(_BUILT_IN_NAMES, name) is not None or (
        re.fullmatch(RESOURCE_WITH_DOMAIN, name) is not None
        and name.index("/") <= MAX_RESOURCE_DOMAIN
        and _BUILT_IN_DOMAIN not in name
        and not name.startswith(QUOTA)
    )


def is_extended_resource_cel(name: str) -> str:
    """CEL for whether a container can request an extended resource of this name, which has a domain."""
    return (
        f"{name}.indexOf('/') <= {MAX_RESOURCE_DOMAIN} && !{name}.contains('{_BUILT_IN_DOMAIN}')"
        f" && !{name}.startsWith('{QUOTA}')"
    )


def _suggestions(name: str) -> list[str]:
    """Suggestions for a name that is not a resource."""
    if re.fullmatch(_ACCELERATOR, name) is not None:
        return ["for GPUs use gpusPerNode and gpuResource of the pool"]
    return [f"did you mean {near}?" for near in similar_names(name, COMMON_RESOURCES)]


def _name_rule(field: str, read: Callable[[Resources], dict[str, str]]) -> Rule:
    def invalid(resources: Resources) -> list[str]:
        return [name for name in read(resources) if not is_resource_name(name)]

    return rule(
        Resources,
        f"Resources.{field}",
        field=f".{field}",
        cel=(
            f"self.{field}.all(k, k.matches({cel_text(_BUILT_IN_NAMES)})"
            f" || (k.matches({cel_text(RESOURCE_WITH_DOMAIN)}) && {is_extended_resource_cel('k')}))"
        ),
        wrong="must name a resource that a container can request",
        advice=(
            f"use {', '.join(COMMON_RESOURCES)}, {HUGE_PAGES}<size> such as {HUGE_PAGES}2Mi, or an extended resource "
            "such as rdma/hca, whose domain does not contain kubernetes.io"
        ),
        holds=lambda resources: not invalid(resources),
        fault_paths=lambda resources: [(name,) for name in invalid(resources)],
        details=lambda _, path: _suggestions(str(path[0])),
        is_about_key=True,
    )


def _is_count(text: str) -> bool:
    """Whether an amount has digits only, at most `_MAX_DIGITS`."""
    return re.fullmatch(rf"[0-9]{{1,{_MAX_DIGITS}}}", text) is not None


def _not_counts(resources: Resources) -> list[Path]:
    """Paths of extended resources whose amount is not a whole number of at most `_MAX_COUNT`."""
    return [
        (field, name)
        for field, amounts in (("requests", resources.requests), ("limits", resources.limits))
        for name, text in amounts.items()
        if _is_extended(name) and not _is_count(text)
    ]


def _is_count_cel(field: str) -> str:
    """CEL for whether each amount of an extended resource has digits only. Before Kubernetes 1.34, the API server
    estimates the cost of CEL as if each quantity could be megabytes long. A function that reads the whole string would
    exceed the cost limit; `charAt` does not."""
    value = f"self.{field}[k]"
    letters = list(range(_MAX_DIGITS))
    return (
        f"self.{field}.all(k, !k.contains('/') || (type({value}) == int ? {value} <= {_MAX_COUNT} :"
        f" size({value}) <= {_MAX_DIGITS} && {letters}.all(i, i >= size({value}) ||"
        f" ({value}.charAt(i) >= '0' && {value}.charAt(i) <= '9'))))"
    )


def _not_equal(resources: Resources) -> list[Path]:
    """Paths, relative to `requests`, of extended resources and huge pages whose request is not equal to the limit."""
    return [
        (name,)
        for name, text in resources.requests.items()
        if (_is_extended(name) or name.startswith(HUGE_PAGES))
        and (name not in resources.limits or number_of(resources.limits[name]) != number_of(text))
    ]


def _huge_pages(resources: Resources) -> list[tuple[Path, str, str]]:
    """Path, name and amount of each entry for huge pages."""
    return [
        ((field, name), name, text)
        for field, amounts in (("requests", resources.requests), ("limits", resources.limits))
        for name, text in amounts.items()
        if re.fullmatch(_BUILT_IN_NAMES, name) is not None and name.startswith(HUGE_PAGES)
    ]


def _pages_without_memory(resources: Resources) -> list[Path]:
    """Paths of the entries for huge pages, if there is no entry for memory or CPUs."""
    if {"cpu", "memory"} & (resources.requests.keys() | resources.limits.keys()):
        return []
    return [path for path, _, _ in _huge_pages(resources)]


def _partial_pages(resources: Resources) -> list[Path]:
    """Paths of the entries for huge pages whose amount is not a multiple of the page size."""
    return [
        path
        for path, name, text in _huge_pages(resources)
        if number_of(text) % number_of(name.removeprefix(HUGE_PAGES)) != 0
    ]


def _order_rule(name: str) -> Rule:
    """The rule that the request for a resource is not larger than its limit."""

    def number(amounts: str) -> str:
        value = f"self.{amounts}['{name}']"
        # `quantity(string(...))` would work for both types, but costs too much in some versions of the API server.
        return f"(type({value}) == int ? quantity('0').add({value}) : quantity({value}))"

    def holds(resources: Resources) -> bool:
        if name not in resources.requests or name not in resources.limits:
            return True
        return number_of(resources.requests[name]) <= number_of(resources.limits[name])

    return rule(
        Resources,
        f"Resources.{name}",
        field=".requests",
        cel=(
            f"!('{name}' in self.requests) || !('{name}' in self.limits) ||"
            f" {number('requests')}.compareTo({number('limits')}) <= 0"
        ),
        wrong=f"the request for {name} must not be larger than limits.{name}",
        advice=f"reduce the request, or increase limits.{name}",
        holds=holds,
        fault_paths=lambda _: [(name,)],
    )


RESOURCE_RULES = (
    _name_rule("requests", lambda resources: resources.requests),
    _name_rule("limits", lambda resources: resources.limits),
    rule(
        Resources,
        "Resources.extendedResources",
        field="",
        cel=f"{_is_count_cel('requests')} && {_is_count_cel('limits')}",
        wrong=f"the amount of an extended resource must be a whole number of at most {_MAX_COUNT}",
        advice="use digits only, such as 1",
        holds=lambda resources: not _not_counts(resources),
        fault_paths=_not_counts,
    ),
    rule(
        Resources,
        "Resources.requestEqualsLimit",
        field=".requests",
        # For huge pages this CEL does not compare the amounts, because that would cost too much. The operator does.
        cel=(
            f"self.requests.all(k, !k.contains('/') && !k.startsWith('{HUGE_PAGES}') ||"
            " k in self.limits &&"
            " (!k.contains('/') || int(self.requests[k]) == int(self.limits[k])))"
        ),
        wrong="the request for an extended resource or huge pages must be equal to the limit",
        advice="set the same amount under limits, or set limits only",
        holds=lambda resources: not _not_equal(resources),
        fault_paths=_not_equal,
    ),
    *(_order_rule(name) for name in COMMON_RESOURCES),
    rule(
        Resources,
        "Resources.hugePages",
        field="",
        cel=(
            f"!self.limits.exists(k, k.startsWith('{HUGE_PAGES}')) || 'cpu' in self.limits ||"
            " 'memory' in self.limits || 'cpu' in self.requests || 'memory' in self.requests"
        ),
        wrong="huge pages require an entry for cpu or memory",
        advice="add memory, for example memory: 1Gi",
        holds=lambda resources: not _pages_without_memory(resources),
        fault_paths=_pages_without_memory,
    ),
    rule(
        Resources,
        "Resources.pageSize",
        field="",
        # A request is equal to the limit. One call of `quantity` for each size: more would cost too much.
        cel=" && ".join(
            f"(!('{name}' in self.limits) || (type({value}) == int ? {value} : quantity({value}).asInteger()) % {size}"
            " == 0)"
            for name, size in _PAGES.items()
            for value in (f"self.limits['{name}']",)
        ),
        wrong="the amount of huge pages must be a multiple of the page size",
        advice="use a multiple, such as 4Mi for hugepages-2Mi",
        holds=lambda resources: not _partial_pages(resources),
        fault_paths=_partial_pages,
    ),
)
