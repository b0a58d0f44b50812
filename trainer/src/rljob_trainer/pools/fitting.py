"""Chooses nodes of the cluster for pools, or explains what is missing. Pure functions.

Amounts are Ray's: `CPU` and `GPU` as counts, `memory` and `object_store_memory` in bytes, an accelerator type as a
resource `accelerator_type:NAME`, of which every node of this type has 1.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, permutations

from rljob_trainer.errors import ResourceError

MEMORY = "memory"
OBJECT_STORE = "object_store_memory"
ACCELERATOR_PREFIX = "accelerator_type:"
MAX_LISTED = 8
"""Maximum number of nodes that a message lists."""
UNITS = 10_000
"""Ray's smallest unit is 1/10,000 of a resource. Amounts are compared as integers in this unit, which is exact."""
GPU = "GPU"
MAX_EXACT_POOLS = 2
"""Up to this many pools, `find_placement` finds a placement whenever one exists."""
MAX_ORDERS = 24
"""Maximum number of orders in which pools are placed; 24 are all orders of four pools."""
_ADVICE = "add nodes or use larger ones, or request less in spec.pools"
_GIB = 2**30


@dataclass(frozen=True)
class ClusterNode:
    """A Ray node that is alive, with its total and its free resources."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    @cached_property
    def room_now(self) -> dict[str, float]:
        """The resources that can be reserved now. Ray never reserves the object store, so its total counts."""
        return {**self.free, OBJECT_STORE: self.total.get(OBJECT_STORE, 0.0)}


@dataclass(frozen=True)
class PoolNeed:
    """The resources that a pool needs: `num_bundles` times `bundle` on each of `num_nodes` different nodes."""

    pool: str
    num_nodes: int
    num_bundles: int
    bundle: Mapping[str, float]
    object_store_bytes: float = 0.0
    """Required size of a node's object store, in bytes; Ray cannot reserve it."""

    @cached_property
    def per_node(self) -> dict[str, float]:
        """The resources that one node must have."""
        reserved = {name: amount * self.num_bundles for name, amount in self.bundle.items()}
        return {**reserved, **({OBJECT_STORE: self.object_store_bytes} if self.object_store_bytes else {})}

    def __str__(self) -> str:
        return f"{_count(self.num_nodes, 'node')} with {amounts_text(self.per_node)}"


def node_order(address: str, node_id: str) -> tuple[int, int, str, str]:
    """Returns the sort key of a node: IP addresses numerically, then host names; equal ones by node id."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 9, 0, address, node_id
    return parsed.version, int(parsed), "", node_id


def check_feasible(needs: Sequence[PoolNeed], nodes: Sequence[ClusterNode]) -> None:
    """Raises ResourceError if the pools would not fit even if all nodes were free. If a pool does not fit alone, the
    message says what each node lacks; else it says which resource is missing for all pools together."""
    for need in needs:
        gaps = [(node, found) for node in nodes if (found := _gaps(need.per_node, node.total, node))]
        num_fitting = len(nodes) - len(gaps)
        if num_fitting < need.num_nodes:
            few = f"; the cluster has only {_count(len(nodes), 'node')}" if len(nodes) < need.num_nodes else ""
            lacking = f": {_lacking(gaps, nodes)}" if gaps else ""
            raise ResourceError(
                f"pool {need.pool}: needs {need} each, but only {num_fitting} of {_count(len(nodes), 'node')} have "
                f"that{lacking}{few}; {_ADVICE}"
            )
    problem = _problem_together(needs, [node.total for node in nodes])
    if problem:
        names = _relevant(needs)
        wanted = ", ".join(f"{need.pool} {need}" for need in needs)
        there = [f"{_name(node, nodes)} {amounts_text(node.total, names)}" for node in nodes]
        raise ResourceError(
            f"pools {', '.join(need.pool for need in needs)}: each fits alone, but {problem} "
            f"(needed: {wanted}; there: {_listed(there)}); {_ADVICE}"
        )


def free_nodes(needs: Sequence[PoolNeed], nodes: Sequence[ClusterNode]) -> list[list[ClusterNode]] | None:
    """Returns the nodes for each pool, in the order of `nodes`, chosen by their free resources; None while these do not
    suffice for all pools."""
    found = find_placement([(need.num_nodes, need.per_node) for need in needs], [node.room_now for node in nodes])
    return None if found is None else [[nodes[index] for index in indices] for indices in found]


def find_placement(
    needs: Sequence[tuple[int, Mapping[str, float]]], rooms: Sequence[Mapping[str, float]]
) -> list[list[int]] | None:
    """Chooses different nodes for each pool. Returns ascending indices of `rooms`; None if no placement was found.

    `needs`: for each pool the number of nodes, and the resources that it needs on each of them. `rooms`: the free
    resources of each node. Pools are placed one after the other. The pool with the fewest spare nodes is first; of
    pools with equally many, the one with the most GPUs per node. Each pool gets the nodes that matter least to the
    pools after it. If a pool finds too few nodes, other orders of the pools are tried (at most `MAX_ORDERS`), and then
    the same orders again with those nodes first that keep the most free GPUs. For up to two pools a placement is found
    whenever one exists. For more pools the search is not exhaustive; in very few cases it misses a placement that
    exists."""
    free = [{name: units(amount) for name, amount in room.items()} for room in rooms]
    wanted = [(number, {name: units(amount) for name, amount in amounts.items()}) for number, amounts in needs]
    num_spare = [sum(_fits(amounts, room) for room in free) - number for number, amounts in wanted]
    if min(num_spare, default=0) < 0:
        return None
    first = sorted(range(len(wanted)), key=lambda pool: (num_spare[pool], -wanted[pool][1].get(GPU, 0), pool))
    for takes_emptiest in (False, True):
        for order in islice(permutations(first), MAX_ORDERS):
            indices_of = _placed_in_order(order, wanted, free, takes_emptiest=takes_emptiest)
            if indices_of is not None:
                return [indices_of[pool] for pool in range(len(wanted))]
    return None


def waiting_text(needs: Sequence[PoolNeed], nodes: Sequence[ClusterNode]) -> str:
    """Returns a message about what the reservation waits for, and what is free now on the nodes that a pool could
    use."""
    return f"{_waiting_for(needs, nodes)} (free now: {_free_text(needs, nodes)})"


def timeout_text(
    needs: Sequence[PoolNeed], nodes: Sequence[ClusterNode], holders: Mapping[str, Sequence[str]], timeout: float
) -> str:
    """Returns the error message after waiting for `timeout` seconds. `holders`: names of the placement groups on each
    node, by node id."""
    names = _relevant(needs)
    used = []
    for node in nodes:
        amounts = {name: amount - node.free.get(name, 0.0) for name, amount in node.total.items() if name in names}
        if any(units(amount) > 0 for name, amount in amounts.items() if _is_counted(name)):
            by = f" by placement groups {', '.join(holders[node.node_id])}" if holders.get(node.node_id) else ""
            taken = [name for name in names if _is_counted(name) and units(amounts.get(name, 0.0)) > 0]
            used.append(f"{_name(node, nodes)} {amounts_text(amounts, taken)}{by}")
    return (
        f"{_waiting_for(needs, nodes)}; timed out after {timeout:.0f} s (free: {_free_text(needs, nodes)}; in use: "
        f"{_listed(used) or 'nothing'}); stop other programs that use these nodes, or increase the timeout "
        "(spec.runPolicy.provisioningDeadlineSeconds)"
    )


def amounts_text(amounts: Mapping[str, float], names: Sequence[str] | None = None) -> str:
    """Formats amounts, such as `CPU 4, GPU 4, memory 8 GiB`: all of them, or those of `names`, also those that are 0.
    An accelerator type has no amount, and is left out if it is not in `amounts`."""
    return ", ".join(
        resource_text(name)
        if name.startswith(ACCELERATOR_PREFIX)
        else f"{resource_text(name)} {_amount_text(name, amounts.get(name, 0.0))}"
        for name in (amounts if names is None else names)
        if name in amounts or not name.startswith(ACCELERATOR_PREFIX)
    )


def units(amount: float) -> int:
    """Converts an amount to Ray's smallest unit."""
    return round(amount * UNITS)


def resource_text(name: str) -> str:
    """Returns a resource's name for messages."""
    if name.startswith(ACCELERATOR_PREFIX):
        return f"accelerator type {name.removeprefix(ACCELERATOR_PREFIX)}"
    return "object store" if name == OBJECT_STORE else name


def _gaps(wanted: Mapping[str, float], room: Mapping[str, float], node: ClusterNode) -> dict[str, str]:
    """Returns the resources that `room` lacks, each with a text for messages. `room`: the total or free resources of
    `node`."""
    gaps = {}
    for name, needed in wanted.items():
        there = room.get(name, 0.0)
        if units(there) < units(needed):
            gaps[name] = (
                f"{resource_text(name)} ({_accelerators(node)} there)"
                if name.startswith(ACCELERATOR_PREFIX)
                else f"{resource_text(name)} ({_amount_text(name, needed)} needed, {_amount_text(name, there)} there)"
            )
    return gaps


def _problem_together(needs: Sequence[PoolNeed], rooms: Sequence[Mapping[str, float]]) -> str:
    """Returns why pools that each fit alone do not fit together; empty if they do fit together."""
    wanted = [(need.num_nodes, need.per_node) for need in needs]
    if find_placement(wanted, rooms) is not None:
        return ""
    names = _relevant(needs)
    if len(needs) <= MAX_EXACT_POOLS:
        missing = [name for name in names if find_placement([(num, _without(of, name)) for num, of in wanted], rooms)]
        return f"not all together: {_either(missing or names)} is missing"
    there = {name: sum(units(room.get(name, 0.0)) for room in rooms) for name in names}
    needed = {name: sum(num * units(of.get(name, 0.0)) for num, of in wanted) for name in names}
    missing = [name for name in names if there[name] < needed[name]]
    if not missing:
        return "no placement for all of them was found, though one may exist"
    return f"not all together: {_either(missing)} is missing"


def _without(amounts: Mapping[str, float], name: str) -> dict[str, float]:
    return {other: amount for other, amount in amounts.items() if other != name}


def _fits(wanted: Mapping[str, int], room: Mapping[str, int]) -> bool:
    return all(room.get(name, 0) >= amount for name, amount in wanted.items())


def _remaining(room: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, int]:
    return {name: amount - wanted.get(name, 0) for name, amount in room.items()}


def _placed_in_order(
    order: Sequence[int],
    wanted: Sequence[tuple[int, Mapping[str, int]]],
    rooms: Sequence[Mapping[str, int]],
    *,
    takes_emptiest: bool,
) -> dict[int, list[int]] | None:
    """Places the pools one after the other, in the given order. Returns by pool the ascending indices of its nodes;
    None if a pool finds too few nodes."""
    free = list(rooms)
    indices_of: dict[int, list[int]] = {}
    for position, pool in enumerate(order):
        num_nodes, amounts = wanted[pool]
        others = [wanted[other][1] for other in order[position + 1 :]]
        suitable = [index for index, room in enumerate(free) if _fits(amounts, room)]
        if len(suitable) < num_nodes:
            return None
        losses = {index: _loss(free[index], amounts, others, takes_emptiest=takes_emptiest) for index in suitable}
        indices_of[pool] = sorted(sorted(suitable, key=losses.__getitem__)[:num_nodes])
        for index in indices_of[pool]:
            free[index] = _remaining(free[index], amounts)
    return indices_of


def _loss(
    room: Mapping[str, int], wanted: Mapping[str, int], others: Sequence[Mapping[str, int]], *, takes_emptiest: bool
) -> tuple[int, ...]:
    """Returns the cost of giving a node to a pool, as a sort key (the smallest is best): the number of other pools that
    no longer fit there, the number of other pools that fitted before, the GPUs that a pool without GPUs would leave
    idle, and the free GPUs that remain. `takes_emptiest` skips the second, and prefers the most remaining GPUs."""
    remaining = _remaining(room, wanted)
    fitting = [other for other in others if _fits(other, room)]
    num_lost = sum(not _fits(other, remaining) for other in fitting)
    idle_gpus = 0 if wanted.get(GPU) else room.get(GPU, 0)
    gpus_left = remaining.get(GPU, 0)
    return (num_lost, idle_gpus, -gpus_left) if takes_emptiest else (num_lost, len(fitting), idle_gpus, gpus_left)


def _waiting_for(needs: Sequence[PoolNeed], nodes: Sequence[ClusterNode]) -> str:
    """Describes the first pool that lacks free nodes, or why the pools do not fit together."""
    for need in needs:
        suitable = [node for node in nodes if not _gaps(need.per_node, node.total, node)]
        gaps = [found for node in suitable if (found := _gaps(need.per_node, node.room_now, node))]
        num_free = len(suitable) - len(gaps)
        if num_free < need.num_nodes:
            num_missing = need.num_nodes - num_free
            names = {name for found in sorted(gaps, key=len)[:num_missing] for name in found}
            return (
                f"pool {need.pool}: {num_free} of {_count(need.num_nodes, 'node')} available, waiting for "
                f"{', '.join(resource_text(name) for name in need.per_node if name in names)} on "
                f"{_count(num_missing, 'node')}"
            )
    pools = ", ".join(need.pool for need in needs)
    problem = _problem_together(needs, [node.room_now for node in nodes])
    if problem:
        return f"pools {pools}: nodes are available for each pool alone, but {problem}"
    return f"pool{'s' if needs[1:] else ''} {pools}: all nodes are available, waiting for Ray to reserve them"


def _free_text(needs: Sequence[PoolNeed], nodes: Sequence[ClusterNode]) -> str:
    """Lists what is free on the nodes that some pool could use if nothing else used them."""
    names = [name for name in _relevant(needs) if _is_counted(name)]
    texts = []
    for node in nodes:
        if any(not _gaps(need.per_node, node.total, node) for need in needs):
            amounts = [
                f"{name} {_amount_text(name, node.free.get(name, 0.0))} of {_amount_text(name, node.total[name])}"
                for name in names
                if name in node.total
            ]
            texts.append(f"{_name(node, nodes)} {', '.join(amounts)}")
    return _listed(texts)


def _lacking(gaps: Sequence[tuple[ClusterNode, Mapping[str, str]]], nodes: Sequence[ClusterNode]) -> str:
    """Lists what the nodes lack: nodes with the same gaps together, nodes that lack the fewest resources first."""
    groups: dict[str, list[str]] = {}
    for node, found in sorted(gaps, key=lambda gap: len(gap[1])):
        groups.setdefault(", ".join(found.values()), []).append(_name(node, nodes))
    return _listed(
        [f"{_listed(names, ', ')} {'lack' if names[1:] else 'lacks'} {gap}" for gap, names in groups.items()]
    )


def _relevant(needs: Sequence[PoolNeed]) -> list[str]:
    return list(dict.fromkeys(name for need in needs for name in need.per_node))


def _is_counted(name: str) -> bool:
    """Whether the resource is consumed by reservations."""
    return name != OBJECT_STORE and not name.startswith(ACCELERATOR_PREFIX)


def _name(node: ClusterNode, nodes: Sequence[ClusterNode]) -> str:
    """Returns a node's address, with its id if several nodes have this address."""
    is_shared = sum(other.address == node.address for other in nodes) > 1
    return f"{node.address} ({node.node_id[:8]})" if is_shared else node.address


def _accelerators(node: ClusterNode) -> str:
    names = [name.removeprefix(ACCELERATOR_PREFIX) for name in node.total if name.startswith(ACCELERATOR_PREFIX)]
    return ", ".join(names) or "none"


def _listed(texts: Sequence[str], separator: str = "; ") -> str:
    more = [f"{len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else []
    return separator.join([*texts[:MAX_LISTED], *more])


def _either(names: Sequence[str]) -> str:
    texts = [resource_text(name) for name in names]
    return f"{', '.join(texts[:-1])} or {texts[-1]}" if texts[1:] else texts[0]


def _amount_text(name: str, amount: float) -> str:
    return f"{amount / _GIB:.6g} GiB" if name in (MEMORY, OBJECT_STORE) else f"{round(amount, 4):g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
