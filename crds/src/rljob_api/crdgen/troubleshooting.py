"""Writes docs/troubleshooting.md: every reason that a condition may give, what it means, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.conditions import REASONS, ConditionType, Reason
from rljob_api.explanations import EXPLANATIONS

_HEADER = """\
<!-- Generated from the reasons in rljob_api by `python -m rljob_api.crdgen`; do not edit. -->
# Troubleshooting

`rljob explain NAME` says what a job is waiting for, which pods are not ready and why, the latest warnings, and what
comes next. The same without `rljob`:

```
kubectl describe rlj NAME                                      # conditions and events
kubectl get pods -l rljob.dev/job=NAME                         # its pods
kubectl logs -c driver -l rljob.dev/job=NAME,ray.io/node-type=head --tail=-1     # what the training prints
```

`status.reason`, the column REASON of `kubectl get rlj`, is the reason to look up below (`rljob explain --reason REASON`
prints the same). It is that of Failed or Complete where a job has ended, that of Retrying where another attempt is due,
else that of the first condition that says what is missing. A job goes through the conditions in this order:

{conditions}

## Before there is any condition

- *The API server refuses the file.* The message names the field and the rule; `rljob validate FILE` shows the line.
- *`no matches for kind "RLJob"`.* The operator's chart is not installed in this cluster ([install.md](install.md)).
- *The job has no conditions.* No operator looks at it: none runs, or it does not handle this namespace
  (`watchNamespaces`). `kubectl get pods --all-namespaces -l app.kubernetes.io/name=rljob-operator`
- *The operator does not start.* Its log names the setting or the right that is missing.
"""

_FOOTER = """\
## What the training says

### The batch of a step is not full

`spec.training.algorithm.dynamicSampling.maxRounds: the batch of step 31 is not full after 10 rounds: 5 of 320 groups
can be trained on, 32 are needed; in the other groups all scores are equal (mean score of all responses: 0.98, min 0,
max 1)`. A ConfigurationError: another attempt would draw the same.

Dynamic sampling replaces groups whose responses all have the same score, because nothing can be learned from them, and
after `maxRounds` rounds of fresh prompts too few were left. The scores in the message say why:

- *The mean is near the highest score:* the policy solves nearly every prompt. The run has reached what these prompts
  can teach.
- *The mean is near the lowest score:* it solves nearly none. The prompts are too hard for the model, responses are cut
  off by `rollout.maxNewTokens`, or the reward does not find the answer: `samples.jsonl` shows responses, scores, and in
  `found` what `MathAnswer` took as the answer.
- *All scores are the same number:* the reward tells nothing apart; or its scorer failed on whole groups and they have
  `errorScore` (`reward/error_rate`, `reward/timeout_rate`).
- *The message names a reward (`all scores of 'accuracy'`):* groups must differ in that one, too
  (`dynamicSampling.reward`), whatever the weighted sum says.

**What to do:** Take prompts that the model solves now and then, or a reward that tells near misses apart. A larger
`rollout.groupSize` makes groups differ more often; a larger `maxRounds` costs time in each such step
(`dynamic_sampling/rounds`, `dynamic_sampling/kept_fraction` in the [metrics](metrics.md) show it coming). With
`onMaxRounds: TrainOnFewer` a step learns from the groups that there are. With such a change the job is deleted and
created again, under the same name and claim; it goes on from its newest checkpoint.
"""

_WHAT = {
    ConditionType.SPEC_VALID: "the job can run on this cluster as it is written",
    ConditionType.CLUSTER_READY: "all its pods are ready and have joined Ray",
    ConditionType.PLACEMENT_FEASIBLE: "Ray's nodes have what the pools promise",
    ConditionType.JOB_SUBMITTED: "Ray has accepted the trainer",
    ConditionType.PROGRESSING: "the trainer loads or trains",
    ConditionType.CHECKPOINTED: "there is a complete checkpoint",
    ConditionType.SUSPENDED: "the job is suspended, and nothing of it runs",
    ConditionType.RETRYING: "an attempt has failed, and another one follows",
    ConditionType.FINISHED: "the job has ended; Complete or Failed says how",
    ConditionType.COMPLETE: "all steps are done; stays",
    ConditionType.FAILED: "the job has ended otherwise; stays until `rljob retry`",
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
