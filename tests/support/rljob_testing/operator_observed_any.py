"""Any moment that the operator may see of a job, likely or not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunError, RunPhase, RunState
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Condition, ConditionStatus, RLJobStatus
from rljob_operator.reconcile.observed import (
    EffectFailure,
    EffectKind,
    Observed,
    ObservedCluster,
    ObservedJob,
    ObservedPod,
    ObservedRay,
    ObservedRayJob,
    ObservedRayNode,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_testing.operator_jobs import spec
from rljob_testing.operator_observed import SUBMISSION, attempt, cluster, condition, job, run_state

# At and around the deadlines of the specs below.
AGES = st.sampled_from([0, 1, 30, 59, 60, 299, 300, 999, 1000, 1801, 50_000])
TEXTS = st.one_of(
    st.sampled_from(["", "short", "x" * 2000, "\ud800\x1b[31mred\x00" * 100, "line\n" * 300, "é" * 700]),
    st.text(max_size=10),
)
_C, _R = ConditionType, Reason
_ONLY_SUBMITTED = (_C.JOB_SUBMITTED, _C.PROGRESSING)
PROBLEMS = (
    *(_R.UNSCHEDULABLE, _R.IMAGE_PULL_FAILED, _R.CONTAINER_CONFIG_ERROR, _R.VOLUME_MOUNT_FAILED),
    *(_R.CONTAINER_CRASHING, _R.OUT_OF_MEMORY, _R.INFRASTRUCTURE_ERROR),
)


@cache
def _specs() -> list[RLJobSpec]:
    """Checking a job takes milliseconds, so these few are made once."""
    policy = {"provisioningDeadlineSeconds": 300, "activeDeadlineSeconds": 1000, "gracePeriodSeconds": 30}
    return [
        spec(),
        spec({"pools[0].nodes": 2, "runPolicy": policy}),
        spec({"runPolicy": {"cleanup": "KeepCluster"}}),
        spec({"checkpoint": {}}),
    ]


def _status(
    kind: int,
    age: int,
    asked: bool,
    drawn: tuple[Condition | None, ...],
    ended: ConditionType | None,
    state: RunState | None,
) -> RLJobStatus:
    """`kind`: 0 nothing yet, 1 no cluster seen, 2 cluster seen, 3 and more submitted."""
    if kind == 0:
        return RLJobStatus()
    submitted = kind > 2
    first = attempt(seconds_ago=age, seen=kind > 1, submissions=int(submitted))
    if submitted and asked:
        first = first.model_copy(update={"reason": "ActiveDeadlineExceeded"})
    kept = [each for each in drawn if each is not None and (submitted or each.type not in _ONLY_SUBMITTED)]
    last = [] if ended is None else [condition(ended, reason=_R.SUCCEEDED)]
    return RLJobStatus(
        attempts=(first,),
        conditions=(*kept, *last),
        progress=state.progress if state and submitted else None,
        checkpoint=state.checkpoint if state and submitted else None,
    )


def _conditions() -> st.SearchStrategy[tuple[Condition | None, ...]]:
    """What earlier passes may have left."""
    any_reason, any_status = st.sampled_from(Reason), st.sampled_from(ConditionStatus)
    reasons = {
        _C.JOB_SUBMITTED: st.just(_R.SUBMITTED),
        _C.PROGRESSING: st.sampled_from([_R.STARTING, _R.TRAINING, _R.STOPPING, _R.DASHBOARD_UNREACHABLE]),
    }
    kinds = [kind for kind in ConditionType if kind not in (_C.COMPLETE, _C.FAILED)]
    return st.tuples(
        *(
            st.one_of(st.none(), st.builds(condition, st.just(kind), any_status, reasons.get(kind, any_reason), AGES))
            for kind in kinds
        )
    )


def _states() -> st.SearchStrategy[RunState | None]:
    """What the trainer may have written."""
    error = st.builds(RunError, kind=st.just("Error"), message=TEXTS.map(lambda text: text.replace("\ud800", "")))
    made = st.builds(
        run_state,
        st.sampled_from(RunPhase),
        step=st.integers(0, 10),
        seconds_ago=AGES,
        checkpoint_step=st.sampled_from([None, None, 1, 10]),
        error=st.one_of(st.none(), error),
        export_uri=st.sampled_from([None, "file:///rljob/storage/run/export"]),
    )
    return st.one_of(st.none(), made)


def _pods() -> st.SearchStrategy[tuple[ObservedPod, ...]]:
    """Up to four pods in any state, the head among them or not."""
    problem = st.one_of(st.none(), st.builds(PodProblem, st.sampled_from(PROBLEMS), TEXTS))
    group = st.sampled_from([HEAD_GROUP, "main", "main"])
    # Half of them well: ready, not going, not ended.
    well = st.tuples(st.just(True), st.just(False), st.just(False), st.none(), st.just(False))
    any_state = st.tuples(st.booleans(), st.booleans(), st.booleans(), problem, st.booleans())
    many = st.lists(st.tuples(group, st.one_of(well, any_state)), max_size=4)
    return many.map(
        lambda found: tuple(ObservedPod(f"pod-{number}", group, *state) for number, (group, state) in enumerate(found))
    )


def _rays() -> st.SearchStrategy[ObservedRay]:
    """What the dashboard may say."""
    jobs = st.builds(
        ObservedRayJob,
        st.sampled_from([SUBMISSION, SUBMISSION, SUBMISSION, "example-1-2"]),
        st.sampled_from(RayJobStatus),
        TEXTS,
        st.sampled_from([None, "JOB_SUPERVISOR_ACTOR_DIED", "RUNTIME_ENV_SETUP_FAILURE"]),
        st.sampled_from([None, 0, 1, 2, 75, 130, -9]),
    )
    nodes = st.sampled_from([(), (2,), (1,), (2, 2), (2, 2, 2)]).map(
        lambda gpus: (ObservedRayNode(True, 0), *(ObservedRayNode(False, each) for each in gpus))
    )
    groups = st.sampled_from([(), (), ("1 x {GPU: 9}",)])
    job_or_none = st.one_of(st.none(), jobs, jobs)
    answer = st.builds(ObservedRay, st.just(Reachability.OK), st.none(), nodes, job_or_none, _states(), groups, TEXTS)
    silence = st.builds(
        ObservedRay, st.sampled_from([Reachability.NOT_ASKED, Reachability.UNREACHABLE, Reachability.REJECTED]), TEXTS
    )
    return st.one_of(answer, answer, silence)


def _clusters() -> st.SearchStrategy[ObservedCluster | None]:
    """The job's own in most cases."""
    others = st.sampled_from([cluster(owner_uid=None), cluster(uid="c2"), cluster(deleting=True)])
    own = st.sampled_from([cluster(), cluster(provisioned=True)])
    return st.one_of(st.none(), own, own, others, TEXTS.map(lambda text: cluster(error=text)))


def _observed(
    view: ObservedJob,
    there: ObservedCluster | None,
    found: tuple[ObservedPod, ...],
    seen: ObservedRay,
    failure: EffectFailure | None,
) -> Observed:
    """The dashboard answers only where there is a cluster with a head, and knows only jobs that were submitted."""
    if not any(attempt.submissions for attempt in view.status.attempts):
        seen = replace(seen, job=None, run_state=None)
    has_head = there is not None and any(pod.group == HEAD_GROUP and pod.ready for pod in found)
    return Observed(
        job=view,
        # Without the resource there is no cluster; half of the others show none yet.
        kuberay_installed=there is not None or len(found) % 2 == 0,
        cluster=there,
        pods=found,
        ray=seen if has_head else ObservedRay(Reachability.NOT_ASKED),
        failure=failure,
    )


def _job(number: int, status: RLJobStatus, text: str) -> ObservedJob:
    """With one of the specs, by number, or none that can be read."""
    if number < len(_specs()):
        return job(_specs()[number], status)
    return replace(job(None, status), spec=None, spec_error=text)


@cache
def observations() -> st.SearchStrategy[Observed]:
    """Anything the operator may see, and more."""
    endings = st.sampled_from([None, None, None, _C.COMPLETE, _C.FAILED])
    asked = st.sampled_from([False, False, True])
    statuses = st.builds(_status, st.integers(0, 5), AGES, asked, _conditions(), endings, _states())
    jobs = st.builds(_job, st.sampled_from([0, 0, 1, 1, 2, 3, 4]), statuses, TEXTS)
    failures = st.builds(EffectFailure, st.sampled_from(EffectKind), st.sampled_from(Reason), TEXTS)
    return st.builds(_observed, jobs, _clusters(), _pods(), _rays(), st.one_of(st.none(), failures))
