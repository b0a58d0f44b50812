"""Finds out from a message of the API server whether a ResourceQuota is used up by others, or too small for the job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from rljob_api.quantities import QUANTITY_PATTERN, number_of
from rljob_api.v1alpha1.resources import Resources
from rljob_api.v1alpha1.spec import RLJobSpec

_NUMBERS_OF_PODS = ("pods", "count/pods")
_LIMITS, _REQUESTS = "limits.", "requests."


def is_quota_in_use(message: str, spec: RLJobSpec | None) -> bool:
    """Whether a request failed because others use up a ResourceQuota now. False if the quota is too small for the
    request or for the pods with which the job can run: then the job would wait for ever. `spec`: None if it cannot be
    parsed."""
    if "exceeded quota" not in message:
        return False
    requested, limited = (dict(_amounts(message, word)) for word in ("requested", "limited"))
    needed = requested if spec is None else {name: max(requested[name], _total(spec, name)) for name in requested}
    return bool(limited) and all(number <= limited.get(name, number) for name, number in needed.items())


def _amounts(message: str, word: str) -> Iterator[tuple[str, Fraction]]:
    """The amounts after a word in the message, such as `requested: requests.nvidia.com/gpu=2,pods=1, used: ...`."""
    found = re.search(rf"{word}: (\S+)", message)
    for each in found[1].rstrip(",").split(",") if found else ():
        name, _, amount = each.partition("=")
        if re.fullmatch(QUANTITY_PATTERN, amount):
            yield name, number_of(amount)


def _total(spec: RLJobSpec, name: str) -> Fraction:
    """How much of a resource of a quota the pods with which the job can run need, at least: `pods`, `limits.memory`,
    `requests.cpu`, or `cpu`, which means the same."""
    elastic = spec.run_policy.elastic
    counts = [(1, spec.head.resources, "", 0)]
    for pool in spec.pools:
        nodes = pool.nodes if elastic is None else min(pool.nodes, elastic.min_nodes)
        counts.append((nodes, pool.resources, pool.gpu_resource, pool.gpus_per_node))
    if name in _NUMBERS_OF_PODS:
        return Fraction(sum(count for count, *_ in counts))
    resource = name.removeprefix(_REQUESTS).removeprefix(_LIMITS)
    is_limit = name.startswith(_LIMITS)
    total = Fraction(0)
    for count, resources, gpu_resource, num_gpus in counts:
        is_gpu = resource == gpu_resource
        total += count * (Fraction(num_gpus) if is_gpu else _amount(resources, resource, is_limit=is_limit))
    return total


def _amount(resources: Resources, name: str, *, is_limit: bool) -> Fraction:
    """The limit or the request of a pod. A request that is not set equals the limit."""
    found = resources.limits.get(name) if is_limit else resources.requests.get(name, resources.limits.get(name))
    return number_of(found) if found is not None else Fraction(0)
