"""Whether a job can run on this cluster at all; asked before anything is made for it."""

from __future__ import annotations

from rljob_api.conditions import Reason
from rljob_api.errors import HandoverError
from rljob_api.job_checks import STORAGE_RULE, cluster_violations
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.yaml_text import wire_path
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.environment import spec_document
from rljob_operator.manifests.objects import JobIdentity
from rljob_operator.reconcile.endings import Ending
from rljob_operator.reconcile.observed import ObservedJob


def spec_problem(job: ObservedJob, spec: RLJobSpec, defaults: Defaults) -> Ending | None:
    """Why the job cannot run here as it is written; None when it can."""
    found = cluster_violations(spec, has_default_image=defaults.trainer_image is not None)
    if found:
        reason = Reason.STORAGE_MISSING if found[0].rule == STORAGE_RULE else Reason.INVALID_SPEC
        return Ending(reason, "; ".join(f"{wire_path(each.path)}: {each.message}" for each in found))
    try:
        spec_document(JobIdentity(job.namespace, job.name, job.uid), spec)
    except HandoverError as error:
        return Ending(Reason.INVALID_SPEC, str(error))
    return None
