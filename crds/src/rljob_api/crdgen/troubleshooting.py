"""Writes docs/troubleshooting.md: every reason that a condition may give, what it means, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.conditions import REASONS, ConditionType, Reason
from rljob_api.explanations import EXPLANATIONS

_HEADER = """\
<!-- Generated from the reasons in rljob_api by `python -m rljob_api.crdgen`; do not edit. -->
# Troubleshooting

`rljob explain NAME` says what a job is waiting for, which pods are not ready and why, the latest warnings, and what
happens next. Without `rljob`:

```
kubectl describe rlj NAME                                      # conditions and events
kubectl get pods -l rljob.dev/job=NAME                         # its pods
kubectl logs -c driver -l rljob.dev/job=NAME,ray.io/node-type=head --tail=-1     # what the training prints
```

Look up `status.reason`, the column REASON of `kubectl get rlj`, below (`rljob explain --reason REASON` prints the
same). For a finished job it is the reason of Failed or Complete, between two attempts the reason of Retrying, and
otherwise the reason of the first condition that says what is missing. A job goes through the conditions in this order:

{conditions}

## Before there is any condition

- *The API server rejects the file.* The message names the field and the rule; `rljob validate FILE` shows the line.
- *`no matches for kind "RLJob"`.* The operator's chart is not installed in this cluster ([install.md](install.md)).
- *The job has no conditions.* No operator handles it: none runs, or it does not watch this namespace
  (`watchNamespaces`). `kubectl get pods --all-namespaces -l app.kubernetes.io/name=rljob-operator`
- *The operator does not start.* Its log names the missing setting or permission.
"""

_FOOTER = """\
## What the training says

### The batch of a step is not full

`spec.training.algorithm.dynamicSampling.maxRounds: the batch of step 31 is not full after 10 rounds: 5 of 320 groups
can be learned from, 32 are needed; in the others all scores are equal (mean score of all responses: 0.98, from 0 to
1)`. This is a ConfigurationError: another attempt would draw the same prompts.

Dynamic sampling replaces groups whose responses all have the same score, because they contribute nothing to the update.
After `maxRounds` rounds of fresh prompts too few groups were left. The scores in the message say why:

- *The mean is near the highest score:* the policy solves nearly every prompt. The run has reached what these prompts
  can teach.
- *The mean is near the lowest score:* the policy solves nearly no prompt. The prompts are too hard for the model,
  responses are truncated at `rollout.maxNewTokens`, or the reward does not find the answer: `samples.jsonl` shows
  responses, scores, and in `found` the answer that `MathAnswer` read.
- *All scores are the same number:* the reward does not distinguish responses, or its scorer failed on whole groups and
  they have `errorScore` (`reward/error_rate`, `reward/timeout_rate`).
- *The message names a reward (`all scores of 'accuracy'`):* groups must differ in that reward
  (`dynamicSampling.reward`), whatever the weighted sum is.

**What to do:** Use prompts that the model solves sometimes, or a reward that distinguishes near misses. With a larger
`rollout.groupSize` groups differ more often. A larger `maxRounds` costs time in each such step; watch
`dynamic_sampling/rounds` and `dynamic_sampling/kept_fraction` ([metrics](metrics.md)). With `onMaxRounds: TrainOnFewer`
a step trains on the groups that there are. For such a change delete the job and create it again under the same name and
with the same claim; it continues from its newest checkpoint.
"""

_WHAT = {
    ConditionType.SPEC_VALID: "the job can run on this cluster as it is written",
    ConditionType.CLUSTER_READY: "all its pods are ready and have joined Ray",
    ConditionType.PLACEMENT_FEASIBLE: "Ray's nodes have the GPUs of the pools",
    ConditionType.JOB_SUBMITTED: "Ray has accepted the trainer",
    ConditionType.PROGRESSING: "the trainer loads the model or trains",
    ConditionType.CHECKPOINTED: "there is a complete checkpoint",
    ConditionType.SUSPENDED: "the job is suspended and holds no nodes",
    ConditionType.RETRYING: "an attempt has failed, and another one follows",
    ConditionType.FINISHED: "the job has ended; Complete or Failed says how",
    ConditionType.COMPLETE: "all steps are done; it stays True",
    ConditionType.FAILED: "the job has ended without completing; it stays True until `rljob retry`",
}


def troubleshooting_text() -> str:
    """The whole page as Markdown."""
    rows = ["| condition | True means | reasons |", "|---|---|---|"]
    for kind in ConditionType:
        links = ", ".join(f"[{reason}](#{reason.lower()})" for reason in REASONS[kind])
        rows.append(f"| [{kind}](#reasons-of-{kind.lower()}) | {_WHAT[kind]} | {links} |")
    sections = [line for kind in ConditionType for line in _section(kind)]
    return "\n".join([_HEADER.format(conditions="\n".join(rows)), *sections, _FOOTER])


def _section(kind: ConditionType) -> Iterator[str]:
    """The reasons of a condition; each is explained once, where it comes first."""
    yield f"## Reasons of {kind}"
    yield ""
    for reason in REASONS[kind]:
        if _givers(reason)[0] is kind:
            yield from _explained(reason)
    others = [reason for reason in REASONS[kind] if _givers(reason)[0] is not kind]
    if others:
        yield "Also, as above: " + ", ".join(f"[{reason}](#{reason.lower()})" for reason in others) + "."
        yield ""


def _explained(reason: Reason) -> Iterator[str]:
    explanation, others = EXPLANATIONS[reason], _givers(reason)[1:]
    yield f"### {reason}"
    yield ""
    yield explanation.means + (f" Also a reason of {', '.join(others)}." if others else "")
    yield ""
    yield f"**What to do:** {explanation.advice}"
    yield ""


def _givers(reason: Reason) -> list[ConditionType]:
    """The conditions that give a reason, in the order in which a job gets there."""
    return [kind for kind in ConditionType if reason in REASONS[kind]]
