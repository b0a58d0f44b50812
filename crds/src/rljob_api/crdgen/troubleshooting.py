"""Generates docs/troubleshooting.md: the meaning of every reason of every condition, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.conditions import REASONS, ConditionType, Reason
from rljob_api.explanations import EXPLANATIONS

_HEADER = """\
<!-- Generated from the reasons in rljob_api by `python -m rljob_api.crdgen`; do not edit. -->
# Troubleshooting

`rljob explain NAME` shows what a job is waiting for, which pods are not ready and why, the latest warnings, and what
comes next. Without `rljob`:

```
kubectl describe rlj NAME                                      # conditions and events
kubectl get pods -l rljob.dev/job=NAME                         # its pods
kubectl logs -c driver -l rljob.dev/job=NAME,ray.io/node-type=head --tail=-1     # output of the trainer
```

Look up `status.reason`, the column REASON of `kubectl get rlj`, in this page; `rljob explain --reason REASON` prints
the same text. It is the reason of Failed or Complete for a finished job, of Retrying before another attempt, and
otherwise of the first condition that is not satisfied. A job reaches the conditions in this order:

{conditions}

## Before the first condition

- *The API server rejects the file.* The message names the field and the rule; `rljob validate FILE` shows the line.
- *`no matches for kind "RLJob"`.* The operator's chart is not installed in this cluster ([install.md](install.md)).
- *The job has no conditions.* No operator handles it: none is running, or it does not watch this namespace
  (`watchNamespaces`). List the operator's pods with
  `kubectl get pods --all-namespaces -l app.kubernetes.io/name=rljob-operator`.
- *The operator does not start.* Its log names the invalid setting or the missing permission.
"""

_FOOTER = """\
## Errors of the training

### The batch of a step is not full

`spec.training.algorithm.dynamicSampling.maxRounds: the batch of step 31 is not full after 10 rounds: 5 of 320 groups
can be trained on, 32 are needed; in the other groups all scores are equal (mean score of all responses: 0.98, min 0,
max 1)`. This is a ConfigurationError, because another attempt would generate the same responses.

Dynamic sampling replaces groups whose responses all have the same score, because they have no learning signal. After
`maxRounds` rounds of new prompts there were still too few other groups. The scores in the message show why:

- *The mean is close to the highest score:* the policy solves nearly every prompt. The run has learned what these
  prompts can teach.
- *The mean is close to the lowest score:* the policy solves nearly no prompt. The prompts are too hard for the model,
  responses are truncated at `rollout.maxNewTokens`, or the reward does not find the answer: `samples.jsonl` shows
  responses, scores, and in `found` the answer that `MathAnswer` extracted.
- *All scores are the same number:* the reward does not distinguish responses; or its scorer failed on whole groups,
  which have `errorScore` (`reward/error_rate`, `reward/timeout_rate`).
- *The message names a reward (`all scores of 'accuracy'`):* the scores of this reward must also differ within a group
  (`dynamicSampling.reward`), not only the weighted sum.

**What to do:** Use prompts that the model sometimes solves, or a reward with partial credit. With a larger
`rollout.groupSize` the scores of a group differ more often. A larger `maxRounds` takes more time in such steps; the
[metrics](metrics.md) `dynamic_sampling/rounds` and `dynamic_sampling/kept_fraction` show the trend. With
`onMaxRounds: TrainOnFewer` a step trains on the groups that were found. To change these fields, delete the job and
create it again with the same name and claim; it resumes from its newest checkpoint.
"""

_MEANING_OF_TRUE = {
    ConditionType.SPEC_VALID: "the job can run on this cluster as it is written",
    ConditionType.CLUSTER_READY: "all pods are ready and have joined Ray",
    ConditionType.PLACEMENT_FEASIBLE: "Ray's nodes have the GPUs that the pools request",
    ConditionType.JOB_SUBMITTED: "Ray has accepted the trainer",
    ConditionType.PROGRESSING: "the trainer is loading or training",
    ConditionType.CHECKPOINTED: "there is a complete checkpoint",
    ConditionType.SUSPENDED: "the job is suspended, and its pods are deleted",
    ConditionType.RETRYING: "an attempt failed, and another one follows",
    ConditionType.FINISHED: "the job is Complete or Failed",
    ConditionType.COMPLETE: "all steps are completed; stays True",
    ConditionType.FAILED: "the job finished without success; stays True until `rljob retry`",
}


def troubleshooting_text() -> str:
    """The whole page as Markdown."""
    rows = ["| condition | True means | reasons |", "|---|---|---|"]
    for kind in ConditionType:
        links = ", ".join(f"[{reason}](#{reason.lower()})" for reason in REASONS[kind])
        rows.append(f"| [{kind}](#reasons-of-{kind.lower()}) | {_MEANING_OF_TRUE[kind]} | {links} |")
    sections = [line for kind in ConditionType for line in _section(kind)]
    return "\n".join([_HEADER.format(conditions="\n".join(rows)), *sections, _FOOTER])


def _section(kind: ConditionType) -> Iterator[str]:
    """The reasons of a condition. Each reason is explained once, at its first condition."""
    yield f"## Reasons of {kind}"
    yield ""
    for reason in REASONS[kind]:
        if _conditions_with(reason)[0] is kind:
            yield from _explained(reason)
    others = [reason for reason in REASONS[kind] if _conditions_with(reason)[0] is not kind]
    if others:
        yield "Also: " + ", ".join(f"[{reason}](#{reason.lower()})" for reason in others) + "."
        yield ""


def _explained(reason: Reason) -> Iterator[str]:
    explanation, others = EXPLANATIONS[reason], _conditions_with(reason)[1:]
    yield f"### {reason}"
    yield ""
    yield explanation.means + (f" Also a reason of {', '.join(others)}." if others else "")
    yield ""
    yield f"**What to do:** {explanation.advice}"
    yield ""


def _conditions_with(reason: Reason) -> list[ConditionType]:
    """The conditions that can have a reason, in the order in which a job reaches them."""
    return [kind for kind in ConditionType if reason in REASONS[kind]]
