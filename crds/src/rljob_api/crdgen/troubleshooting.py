"""Generates docs/troubleshooting.md: the meaning of every reason of every condition, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.conditions import REASONS, ConditionType, Reason
from rljob_api.explanations import EXPLANATIONS

_HEADER = """\
<!-- Generated from the reasons in rljob_api by `python -m rljob_api.crdgen`; do not edit. -->
# Troubleshooting

Choose what you see:

- A message of `rljob run` or in the trainer's log: [Messages of the training](#messages-of-the-training).
- An alarm, such as `alarm ResponsesCutOff`: [Reasons of TrainingHealthy](#reasons-of-traininghealthy).
- The score does not rise: [The held-out score does not rise](#the-held-out-score-does-not-rise).
- The training is slow: [tuning](tuning.md).
- A reason in `kubectl get rlj`, such as `Unschedulable`: [Jobs on a cluster](#jobs-on-a-cluster).
- The column REASON of `kubectl get rlj` is empty: [Before the first condition](#before-the-first-condition).

## Jobs on a cluster

`rljob explain NAME` shows what a job is waiting for, which pods are not ready and why, the latest warnings, and what
comes next. Without `rljob`:

```
kubectl describe rlj NAME                       # conditions and events
kubectl get pods -l rljob.dev/job=NAME          # its pods
kubectl logs -c driver --tail=-1 \\
  -l rljob.dev/job=NAME,ray.io/node-type=head   # output of the training
```

Search this page for the reason, which `kubectl get rlj` prints in the column REASON (`status.reason`).
`rljob explain --reason REASON` prints the same text. For a finished job the column shows the reason of Failed or
Complete, before another attempt the reason of Retrying, and for a suspended job Suspended. Otherwise it shows the
reason of the first condition before Progressing that is not True; if all are True, the reason of Progressing. A job
reaches the conditions in this order:

{conditions}

## Before the first condition

- *The API server rejects the file.* The message names the field and the rule; `rljob validate FILE` shows the line.
- *`no matches for kind "RLJob"`.* The operator's chart is not installed in this cluster ([install.md](install.md)).
- *The job has no conditions.* No operator handles the job: no operator is running, or it does not watch this namespace
  (`watchNamespaces`). List the operator's pods with
  `kubectl get pods --all-namespaces -l app.kubernetes.io/name=rljob-operator`.
- *The operator does not start.* Its log (`kubectl logs`) names the invalid setting or the missing permission.
"""

_FOOTER = """\
## Messages of the training

`rljob run` prints these messages. On a cluster they are in the message of a condition, or in `rljob logs NAME`. Each
heading is the part of the message that is the same in every run.

### already contains a run

The run folder has results of an earlier run, for example because a job with the same `metadata.name` ran before.

**What to do:** Add `--resume` to continue the earlier run, or write the new run into another folder with
`--run-folder FOLDER`.

### usually because the machine ran out of memory

The whole line is `exit code 137: the trainer was killed; usually because the machine ran out of memory`: a process of
the training ended by SIGKILL. `dmesg | grep -i oom` shows whether the kernel did this because of memory.

**What to do:** Close other programs, use a machine with more memory, or reduce the memory of the job: `rljob plan`
prints it, and [Fit the job into memory](guides.md#fit-the-job-into-memory) has the fields to change. `--resume`
continues from the newest checkpoint.

### out of memory: the kernel killed it

The kernel killed the process of one worker because the machine, or the container of the worker, had no memory left.

**What to do:** On a cluster, increase the memory under spec.pools[].resources. Elsewhere, do the same as for the
message above.

### CUDA out of memory

PyTorch could not allocate memory on the GPU.

**What to do:** Run `rljob plan job.yaml --gpu H100` with the type of your GPU: it names the phase of a step that does
not fit, and changes that make it fit. See also [Fit the job into memory](guides.md#fit-the-job-into-memory).

### vLLM does not have enough memory

vLLM did not start: the memory that it may use is too small for its KV cache, or other models occupy it. The message has
vLLM's own error in parentheses.

**What to do:** Increase `rollout.gpuMemoryUtilization` (on CPUs `rollout.cpuKvCache`) if vLLM needs more, or reduce it
if the memory is not free; or reduce `rollout.maxNumSequences`.

### there is too little memory for the optimizer's moments

The first update creates the optimizer's moments, but vLLM uses so much memory that too little is left for them. The
trainer stops here, because the second rollout would fail.

**What to do:** Reduce `rollout.gpuMemoryUtilization` (on CPUs `rollout.cpuKvCache`), use more GPUs, or set
`model.offload.optimizer: true`.

### the trainer does not support

The whole message is `spec.training.model.source: the trainer does not support 'TYPE' models`. The trainer computes
log-probabilities of a few rows of tokens and compares them with those of the model's own code. They differ too much, so
the model would be trained wrongly.

**What to do:** Choose another model; [models](models.md) lists the types that were tried.

### not enough free space for the checkpoint

The disk, or the claim, is too small for the next checkpoint.

**What to do:** Free space, or keep fewer checkpoints (`checkpoint.keep`). Then run the job with `--resume`, or
`rljob retry NAME` on a cluster.

### ran longer than

The whole message is `ran longer than 10 s and was killed`: a reward exceeded its time limit for one response, twice.
What happens with this response depends on `onTimeout`; by default it is not used.

**What to do:** Make the reward faster, or increase `timeoutSeconds` of the reward
([how rewards run](rewards.md#how-rewards-run)).

### of the responses of the last

`spec.training.maxFailureRate: 0.3 of the responses of the last 3 steps were excluded, because a reward gave no score
(allowed: 0.2; failures: judge UNREACHABLE: 1536)`. For each reward and each kind of failure the message has the number
of responses. `UNREACHABLE`: a service that the reward calls; `TIMEOUT`: the reward took too long; `DIED`: its process
ended; `ERROR`: an exception of its code. `logs/` in the run folder has the first failure of each kind.

**What to do:** Repair the service, then `rljob retry NAME`, or run the job with `--resume`. For `TIMEOUT` increase
`timeoutSeconds` or `numProcesses`. A larger `maxFailureRate` tolerates more failures.

### the batch of step

`spec.training.algorithm.dynamicSampling.maxRounds: the batch of step 31 is not full after 10 rounds: 5 of 320 groups
can be trained on, 32 are needed; in the other groups all scores are equal, or fewer than two responses have scores
(mean score of all responses: 0.98, min 0, max 1)`. This is a ConfigurationError, because another attempt would generate
the same responses. With `refill: Continuous` the message has the number of prompts instead of rounds.

Dynamic sampling replaces groups whose responses all have the same score, because they have no learning signal. After
`maxRounds` rounds of new prompts there were still too few other groups. The scores in the message show why:

- *The mean is close to the highest score:* the policy solves nearly every prompt. The run has learned what these
  prompts can teach.
- *The mean is close to the lowest score:* the policy solves nearly no prompt. The prompts are too hard for the model,
  responses are truncated at `rollout.maxNewTokens`, or the reward does not find the answer: `samples.jsonl` shows
  responses, scores, and in `found` the answer that `MathAnswer` extracted.
- *All scores are the same number:* the reward gives every response the same score, or it failed for whole groups (see
  the metrics `outcome/excluded_fraction`, `reward/error_rate` and `reward/timeout_rate`).
- *The message names a reward (`all scores of 'accuracy'`):* the scores of this reward must also differ within a group
  (`dynamicSampling.reward`), not only the weighted sum.

**What to do:** Use prompts that the model sometimes solves, or a reward with partial credit. With a larger
`rollout.groupSize` the scores of a group differ more often. A larger `maxRounds` takes more time in such steps; the
[metrics](metrics.md) `dynamic_sampling/rounds` and `dynamic_sampling/kept_fraction` show the trend. With
`onMaxRounds: TrainOnFewer` a step trains on the groups that were found. To change these fields, delete the job and
create it again with the same name and claim; it resumes from its newest checkpoint.

## The held-out score does not rise

Read some lines of `samples.jsonl` first: prompts, responses and scores. Then compare the [metrics](metrics.md):

- *All scores are 0.* The task is too hard for the model, or the reward never finds what it looks for. **What to do:**
  Test the reward on responses from `samples.jsonl` ([how](tutorial-own-reward.md#2-test-it-on-rows)). Use easier
  prompts, or a reward with partial credit.
- *`outcome/excluded_fraction`, `reward/error_rate` or `reward/timeout_rate` is above 0.* The reward fails, or is too
  slow. **What to do:** Read the warning in the worker's log ([how rewards run](rewards.md#how-rewards-run)).
- *`response_length/clip_ratio` is high.* Responses are truncated before the answer. **What to do:** Increase
  `rollout.maxNewTokens`.
- *`actor/trained_fraction` is low.* Most groups have equal scores and are not used in the update. **What to do:**
  Increase `rollout.groupSize`, use other prompts, or use [DAPO](algorithms.md#dapo).
- *Only the training reward rises.* There are too few training prompts, or they differ from the held-out prompts. **What
  to do:** Use more prompts, or [keep the model close to the original](guides.md#keep-the-model-close-to-the-original).
- *Nothing changes.* The learning rate is too low, or there were too few steps. **What to do:** Increase
  `optimizer.learningRate` or `steps`.
- *The score falls, and `actor/kl_loss` or `actor/grad_norm` grows quickly.* The learning rate is too high. **What to
  do:** Reduce `optimizer.learningRate`.
"""

_MEANING_OF_TRUE = {
    ConditionType.SPEC_VALID: "the job can run on this cluster as it is written",
    ConditionType.QUOTA_RESERVED: "the queue (Kueue) has admitted the RayCluster; only for jobs in a queue",
    ConditionType.CLUSTER_READY: "all pods are ready and have joined Ray",
    ConditionType.PLACEMENT_FEASIBLE: "Ray's nodes have the GPUs that the pools request",
    ConditionType.JOB_SUBMITTED: "Ray has accepted the trainer",
    ConditionType.PROGRESSING: "the trainer is loading or training",
    ConditionType.CHECKPOINTED: "there is a complete checkpoint",
    ConditionType.TRAINING_HEALTHY: "the trainer reports no [alarm](training-health.md); stops nothing",
    ConditionType.SUSPENDED: "the job is suspended, and its pods are deleted",
    ConditionType.RETRYING: "an attempt ended before the job was complete, and another one follows",
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
        links = ", ".join(f"[{reason}](#{reason.lower()})" for reason in others)
        yield f"Reasons that are explained above: {links}."
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
