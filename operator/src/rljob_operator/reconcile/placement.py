"""Judges whether Ray can place the trainer's placement groups: sets PlacementFeasible."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.reconcile.observed import Observed, ObservedRay, Reachability
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft


def report_placement(draft: StatusDraft, observed: Observed, spec: RLJobSpec, *, cluster_ready: bool) -> str | None:
    """Sets PlacementFeasible once the cluster is ready. Returns what is missing; None if nothing is missing, or if this
    is not known because the cluster is not ready or Ray does not respond."""
    ray = observed.ray
    if not cluster_ready or ray.reachability is not Reachability.OK:
        return None
    reason, message = _placement_finding(spec, ray)
    feasible = reason is Reason.FEASIBLE
    draft.set(ConditionType.PLACEMENT_FEASIBLE, TRUE if feasible else FALSE, reason, message)
    return None if feasible else message


def _placement_finding(spec: RLJobSpec, ray: ObservedRay) -> tuple[Reason, str]:
    """Reason and message of PlacementFeasible."""
    expected = sorted((pool.gpus_per_node for pool in spec.pools for _ in range(pool.nodes)), reverse=True)
    seen = sorted((node.num_gpus for node in ray.nodes if not node.is_head), reverse=True)
    numbers = f"Ray has {sum(seen)} of {sum(expected)} GPUs"
    if any(found < needed for found, needed in zip(seen, expected, strict=False)):
        return Reason.INSUFFICIENT_GPUS, f"{numbers}; the worker pod with the fewest GPUs has {seen[-1]}"
    if ray.infeasible_groups:
        groups = "; ".join(ray.infeasible_groups)
        return Reason.PLACEMENT_GROUP_INFEASIBLE, f"{numbers}; no Ray node has the resources for {groups}"
    return Reason.FEASIBLE, numbers
