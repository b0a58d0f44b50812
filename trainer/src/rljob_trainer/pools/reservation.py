"""Reserves nodes for pools as Ray placement groups: all of them, or none.

Nothing is held while something else is waited for, so that two runs that wait for each other's nodes cannot happen, and
a small pool never sits on the large node that another pool of the run needs. Each group is bound to the node that
`fitting` chose for it: Ray would put two groups of one pool on the same node.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypedDict

import ray
from ray._private.state import available_resources_per_node
from ray._raylet import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rljob_trainer.errors import ResourceError
from rljob_trainer.pools.fitting import (
    ClusterNode,
    PoolNeed,
    check_feasible,
    free_nodes,
    node_order,
    timeout_text,
    waiting_text,
)

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
REPORT_SECONDS = 4.0
LEAST_GRANT_SECONDS = 0.5
GRANT_SECONDS = 2.0
"""Ray grants what is free within milliseconds; after so long somebody else was faster, and another try is made."""
NODE_LABEL = "ray.io/node-id"


class GroupStats(TypedDict):
    """A part of what Ray tells of the granting of a group."""

    scheduling_state: str


class GroupEntry(TypedDict):
    """A part of what Ray tells of a placement group."""

    name: str
    state: str
    bundles_to_node_id: dict[int, str]
    stats: GroupStats


Report = Callable[[str], None]
"""Told what is waited for, at once and then every `REPORT_SECONDS`."""


@dataclass(frozen=True)
class ReservedNode:
    """A node of a pool, and the group that holds its part of it."""

    node_id: str
    address: str
    group: PlacementGroup


def log_progress(text: str) -> None:
    """Reports to the log."""
    log.info("%s", text)


def cluster_nodes() -> list[ClusterNode]:
    """The living nodes of the cluster, in the order of their addresses."""
    # Ray has no public name for what is free per node; `ray.available_resources()` is the sum.
    free = available_resources_per_node()
    nodes = [
        ClusterNode(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node_order(node.address, node.node_id))


def reserve(
    needs: Sequence[PoolNeed], timeout_seconds: float, are_detached: Sequence[bool], report: Report
) -> list[list[ReservedNode]]:
    """For each pool its nodes, in the order of their addresses. Groups of pools that are detached outlive this process.

    Raises ResourceError that says what is missing: at once when no place is found for all pools even if the cluster
    were empty, after the timeout when they do not become free. Nothing stays reserved then, nor after an interrupt."""
    deadline = time.monotonic() + timeout_seconds
    progress = _Progress(needs, report)
    attempt = _Attempt(needs, are_detached, progress)
    try:
        while True:
            nodes = cluster_nodes()
            check_feasible(needs, nodes)
            chosen = free_nodes(needs, nodes)
            if chosen is not None:
                reserved = attempt.reserve(chosen, deadline)
                if reserved is not None:
                    return reserved
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ResourceError(timeout_text(needs, nodes, _holders(), timeout_seconds))
            progress.tell(nodes)
            time.sleep(min(POLL_SECONDS, remaining))
    except BaseException:
        attempt.withdraw()
        raise


def release(groups: Sequence[PlacementGroup]) -> None:
    """Gives groups back; nothing to do when the connection to Ray is closed, which has done it."""
    if ray.is_initialized():
        for group in groups:
            remove_placement_group(group)


def release_by_id(group_ids: Sequence[str]) -> None:
    """Gives back groups that are known by their ids only, such as another process's that are detached. Those that are
    gone are no error."""
    release([PlacementGroup(PlacementGroupID.from_hex(group_id)) for group_id in group_ids])


class _Progress:
    """Tells what is waited for, when it is time to."""

    def __init__(self, needs: Sequence[PoolNeed], report: Report) -> None:
        self.needs = needs
        self.report = report
        self.next = 0.0

    def tell(self, nodes: Sequence[ClusterNode]) -> None:
        """Reports, unless that was done a moment ago."""
        now = time.monotonic()
        if now >= self.next:
            self.report(waiting_text(self.needs, nodes))
            self.next = now + REPORT_SECONDS


class _Attempt:
    """The groups of one reservation, known by a name of its own: an interrupt can come between the creation of a group
    and the moment when it is in one of our variables."""

    def __init__(self, needs: Sequence[PoolNeed], are_detached: Sequence[bool], progress: _Progress) -> None:
        self.needs = needs
        self.lifetimes = ["detached" if is_detached else None for is_detached in are_detached]
        self.progress = progress
        self.name = uuid.uuid4().hex[:12]
        self.number = 0

    def reserve(self, chosen: Sequence[Sequence[ClusterNode]], deadline: float) -> list[list[ReservedNode]] | None:
        """Groups on the chosen nodes; None, and no group, when they are not all granted soon or by the deadline."""
        self.number += 1
        reserved = [
            [self._group(need, node, index, lifetime) for index, node in enumerate(nodes)]
            for need, nodes, lifetime in zip(self.needs, chosen, self.lifetimes, strict=True)
        ]
        now = time.monotonic()
        # Who does not want to wait gets what is free now all the same.
        limit = min(max(deadline, now + LEAST_GRANT_SECONDS), now + GRANT_SECONDS)
        if all(self._is_granted(node.group, limit) for nodes in reserved for node in nodes):
            return reserved
        self.withdraw()
        return None

    def withdraw(self) -> None:
        """Removes every group that was made. Never raises.

        Ray 2.60 never gives back what a group holds that is removed while Ray grants it (ray-project/ray#64693; without
        the wait `test_ctrl_c_just_after_a_group_was_made_leaves_nothing` fails), so that is waited for, for a while."""
        if not ray.is_initialized():
            return
        deadline = time.monotonic() + GRANT_SECONDS
        with suppress(RayError):
            while not all(map(_is_settled, self._entries().values())) and time.monotonic() < deadline:
                time.sleep(0.005)
            release_by_id(list(self._entries()))

    def _entries(self) -> dict[str, GroupEntry]:
        """What Ray knows of the groups that are there, by their ids."""
        table: dict[str, GroupEntry] = placement_group_table()
        return {
            group_id: entry
            for group_id, entry in table.items()
            if self.name in entry["name"] and entry["state"] != "REMOVED"
        }

    def _group(self, need: PoolNeed, node: ClusterNode, index: int, lifetime: str | None) -> ReservedNode:
        group = placement_group(
            [dict(need.bundle)] * need.num_bundles,
            strategy="STRICT_PACK",
            # Names are unique in a namespace, and that of a removed group may linger for a moment.
            name=f"{need.pool}/{index} {self.name}-{self.number}",
            lifetime=lifetime,
            bundle_label_selector=[{NODE_LABEL: node.node_id}] * need.num_bundles,
        )
        return ReservedNode(node.node_id, node.address, group)

    def _is_granted(self, group: PlacementGroup, deadline: float) -> bool:
        pause = 0.001
        while placement_group_table(group)["state"] != "CREATED":
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            if pause == 0.1:
                self.progress.tell(cluster_nodes())
        return True


def _is_settled(entry: GroupEntry) -> bool:
    """Whether Ray has granted a group, or waits for room for it."""
    return entry["state"] == "CREATED" or entry["stats"]["scheduling_state"] in ("NO_RESOURCES", "INFEASIBLE")


def _holders() -> dict[str, list[str]]:
    """By node id: the names, or else the ids, of the placement groups that have a part of the node."""
    table: dict[str, GroupEntry] = placement_group_table()
    holders: dict[str, list[str]] = {}
    for group_id, entry in table.items():
        if entry["state"] == "CREATED":
            for node_id in set(entry["bundles_to_node_id"].values()):
                holders.setdefault(node_id, []).append(entry["name"] or group_id)
    return holders
