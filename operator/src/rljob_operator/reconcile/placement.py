"""Whether Ray has the nodes and the GPUs that the pools promise, and can place what the trainer reserves."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.reconcile.observed import Observed, ObservedRay, Reachability
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft


def missing_ray_nodes(spec: RLJobSpec, ray: ObservedRay) -> str | None:
    """Which pods have not joined Ray; None when all have."""
    num_workers = sum(pool.nodes for pool in spec.pools)
    num_joined = min(num_workers, sum(not node.is_head for node in ray.nodes))
    has_head = any(node.is_head for node in ray.nodes)
    if num_joined == num_workers and has_head:
        return None
    num_pods = num_workers + 1
    return f"{num_pods} of {num_pods} pods ready, {num_joined + has_head} of them in Ray"


def report_placement(draft: StatusDraft, observed: Observed, spec: RLJobSpec, *, cluster_ready: bool) -> str | None:
    """Sets PlacementFeasible, once the cluster is ready; says nothing new while it is not. Returns what is missing;
    None where nothing is, or nothing is known."""
    ray = observed.ray
    if not cluster_ready or ray.reachability is not Reachability.OK:
        return None
    reason, message = _verdict(spec, ray)
    feasible = reason is Reason.FEASIBLE
    draft.set(ConditionType.PLACEMENT_FEASIBLE, TRUE if feasible else FALSE, reason, message)
    return None if feasible else message


def _verdict(spec: RLJobSpec, ray: ObservedRay) -> tuple[Reason, str]:
    expected = sorted((pool.gpus_per_node for pool in spec.pools for _ in range(pool.nodes)), reverse=True)
    seen = sorted((node.num_gpus for node in ray.nodes if not node.is_head), reverse=True)
    numbers = f"Ray has {sum(seen)} of {sum(expected)} GPUs"
    if any(there < needed for there, needed in zip(seen, expected, strict=False)):
        return Reason.INSUFFICIENT_GPUS, f"{numbers}, {seen[-1]} on the node with the fewest"
    if ray.infeasible_groups:
        return Reason.PLACEMENT_GROUP_INFEASIBLE, f"{numbers}; no node can hold {'; '.join(ray.infeasible_groups)}"
    return Reason.FEASIBLE, numbers
