"""Reserves nodes for pools as Ray placement groups: all of them, or none.

A run that waits has reserved nothing, so two runs never deadlock by waiting for each other's nodes. The nodes of all
pools are chosen together, so a small pool does not take the large node that another pool of the run needs. Each
placement group is bound to the node that `fitting` chose, because Ray could put two groups of one pool on the same
node.
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
GRANT_SECONDS = 2.0
"""How long Ray may take to grant the groups; Ray grants free resources within milliseconds. If this time passes,
another program has probably taken the resources, so nodes are chosen again."""
MIN_GRANT_SECONDS = 0.5
"""How long Ray has at least, even if the deadline of the reservation is nearer or has passed."""
NODE_LABEL = "ray.io/node-id"


class GroupStats(TypedDict):
    """Part of Ray's information about the scheduling of a placement group."""

    scheduling_state: str


class GroupEntry(TypedDict):
    """Part of Ray's information about a placement group."""

    name: str
    state: str
    bundles_to_node_id: dict[int, str]
    stats: GroupStats


Report = Callable[[str], None]
"""Called with a message about what the reservation waits for: when the wait begins, then every `REPORT_SECONDS`."""


@dataclass(frozen=True)
class ReservedNode:
    """A node of a pool, and the placement group that reserves the pool's resources there."""

    node_id: str
    address: str
    group: PlacementGroup


def log_progress(text: str) -> None:
    """Writes the report to the log."""
    log.info("%s", text)


def cluster_nodes() -> list[ClusterNode]:
    """Returns the living nodes of the cluster, in the order of their addresses."""
    # Ray has no public function for the free resources per node; `ray.available_resources()` is the sum over nodes.
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
    """Reserves the nodes of all pools, and returns them for each pool in the order of their addresses. Placement groups
    of detached pools outlive this process.

    Raises ResourceError that says what is missing: immediately if the pools do not fit even on an empty cluster, else
    after the timeout. After an error or an interrupt nothing stays reserved."""
    deadline = time.monotonic() + timeout_seconds
    progress = _Progress(needs, report)
    reservation = _Reservation(needs, are_detached, progress)
    try:
        while True:
            nodes = cluster_nodes()
            check_feasible(needs, nodes)
            chosen = free_nodes(needs, nodes)
            if chosen is not None:
                reserved = reservation.try_nodes(chosen, deadline)
                if reserved is not None:
                    return reserved
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ResourceError(timeout_text(needs, nodes, _holders(), timeout_seconds))
            progress.report_if_due(nodes)
            time.sleep(min(POLL_SECONDS, remaining))
    except BaseException:
        reservation.withdraw()
        raise


def release(groups: Sequence[PlacementGroup]) -> None:
    """Releases placement groups. Does nothing if the connection to Ray is closed: then Ray has released all
    groups except detached ones."""
    if ray.is_initialized():
        for group in groups:
            remove_placement_group(group)


def release_by_id(group_ids: Sequence[str]) -> None:
    """Releases placement groups by their ids, for example detached groups of another process. Ids of groups that no
    longer exist are ignored."""
    release([PlacementGroup(PlacementGroupID.from_hex(group_id)) for group_id in group_ids])


class _Progress:
    """Reports what the reservation waits for, at most every `REPORT_SECONDS`."""

    def __init__(self, needs: Sequence[PoolNeed], report: Report) -> None:
        self.needs = needs
        self.report = report
        self.next_report_at = 0.0

    def report_if_due(self, nodes: Sequence[ClusterNode]) -> None:
        """Reports, unless the last report is too recent."""
        now = time.monotonic()
        if now >= self.next_report_at:
            self.report(waiting_text(self.needs, nodes))
            self.next_report_at = now + REPORT_SECONDS


class _Reservation:
    """The placement groups of one reservation. The names of all groups contain the same unique text, by which
    `withdraw` finds them: an interrupt may come after Ray has created a group and before a variable refers to it."""

    def __init__(self, needs: Sequence[PoolNeed], are_detached: Sequence[bool], progress: _Progress) -> None:
        self.needs = needs
        self.lifetimes = ["detached" if is_detached else None for is_detached in are_detached]
        self.progress = progress
        self.name = uuid.uuid4().hex[:12]
        self.num_tries = 0

    def try_nodes(self, chosen: Sequence[Sequence[ClusterNode]], deadline: float) -> list[list[ReservedNode]] | None:
        """Creates groups on the chosen nodes. If Ray does not grant all groups soon, removes them and returns None."""
        self.num_tries += 1
        reserved = [
            [self._group(need, node, index, lifetime) for index, node in enumerate(nodes)]
            for need, nodes, lifetime in zip(self.needs, chosen, self.lifetimes, strict=True)
        ]
        now = time.monotonic()
        # Even with a timeout of 0, Ray gets a moment to grant what is free now.
        limit = min(max(deadline, now + MIN_GRANT_SECONDS), now + GRANT_SECONDS)
        if all(self._wait_until_granted(node.group, limit) for nodes in reserved for node in nodes):
            return reserved
        self.withdraw()
        return None

    def withdraw(self) -> None:
        """Removes every group that was created. Ignores errors of Ray.

        Ray 2.60 never releases the resources of a group that is removed while it is being granted
        (ray-project/ray#64693; without the wait `test_ctrl_c_just_after_a_group_was_created_leaves_no_reservation`
        fails). So this method first waits, for at most `GRANT_SECONDS`, until no group is being granted."""
        if not ray.is_initialized():
            return
        deadline = time.monotonic() + GRANT_SECONDS
        with suppress(RayError):
            while any(map(_is_being_granted, self._entries().values())) and time.monotonic() < deadline:
                time.sleep(0.005)
            release_by_id(list(self._entries()))

    def _entries(self) -> dict[str, GroupEntry]:
        """Returns Ray's information about the existing groups of this reservation, by group id."""
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
            # Names must be unique in a namespace, and the name of a removed group may stay in use for a moment.
            name=f"{need.pool}/{index} {self.name}-{self.num_tries}",
            lifetime=lifetime,
            bundle_label_selector=[{NODE_LABEL: node.node_id}] * need.num_bundles,
        )
        return ReservedNode(node.node_id, node.address, group)

    def _wait_until_granted(self, group: PlacementGroup, deadline: float) -> bool:
        """Waits until Ray has granted the group, and returns True; False after the deadline."""
        pause = 0.001
        while placement_group_table(group)["state"] != "CREATED":
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            if pause == 0.1:
                self.progress.report_if_due(cluster_nodes())
        return True


def _is_being_granted(entry: GroupEntry) -> bool:
    """Whether Ray is granting a group. False if it has granted the group, or waits for free resources."""
    return entry["state"] != "CREATED" and entry["stats"]["scheduling_state"] not in ("NO_RESOURCES", "INFEASIBLE")


def _holders() -> dict[str, list[str]]:
    """Returns by node id the names of the placement groups on the node; for a group without a name its id."""
    table: dict[str, GroupEntry] = placement_group_table()
    holders: dict[str, list[str]] = {}
    for group_id, entry in table.items():
        if entry["state"] == "CREATED":
            for node_id in set(entry["bundles_to_node_id"].values()):
                holders.setdefault(node_id, []).append(entry["name"] or group_id)
    return holders
