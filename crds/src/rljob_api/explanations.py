"""The meaning of each reason and what to do, for `rljob explain` and the troubleshooting page."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rljob_api.conditions import Reason
from rljob_api.explanations_of_clusters import CREATE_AGAIN, EXPLANATIONS_OF_CLUSTERS, RETRY, Explanation

EXPLANATIONS: Mapping[Reason, Explanation] = MappingProxyType(
    {
        Reason.VALID: Explanation(
            means="The job is valid and can run on this cluster.",
            advice="Nothing to do.",
        ),
        Reason.MEMORY_TOO_SMALL: Explanation(
            means=(
                "The job is valid, but its models probably do not fit into the memory of its GPUs. This is an estimate,"
                " so the job is not rejected."
            ),
            advice=(
                f"Run `rljob plan` with the job file. To change the settings in the message: {CREATE_AGAIN} If the job"
                " runs, ignore this warning."
            ),
        ),
        Reason.INVALID_SPEC: Explanation(
            means=(
                "The job cannot run on this cluster as it is written: the operator or the API server found an invalid"
                " field. Or this version of the operator cannot parse the spec; then a running attempt continues."
            ),
            advice=(
                "Delete the job, correct the fields in the message, and create the job again. `rljob validate` finds"
                " most such faults without a cluster."
            ),
        ),
        Reason.STORAGE_MISSING: Explanation(
            means="The job has no `spec.checkpoint.storage`, the shared storage that its pods need on a cluster.",
            advice=(
                "Delete the job, set spec.checkpoint.storage to a PersistentVolumeClaim with access mode ReadWriteMany"
                " or to a bucket, and create the job again."
            ),
        ),
        Reason.TRAINER_IMAGE_INCOMPATIBLE: Explanation(
            means="The trainer in the image and this operator are incompatible: their versions are too far apart.",
            advice="Use an image of the operator's version; contract versions (`rljob --version`) may differ by one.",
        ),
        **EXPLANATIONS_OF_CLUSTERS,
        Reason.FEASIBLE: Explanation(
            means="Ray's nodes have the GPUs that the job's pools request.",
            advice="Nothing to do.",
        ),
        Reason.INSUFFICIENT_GPUS: Explanation(
            means="A worker pod has fewer GPUs in Ray than its pool requests; the message has the numbers.",
            advice="Check gpuResource and gpusPerNode of the pool, and the device plugin on the Kubernetes nodes.",
        ),
        Reason.PLACEMENT_GROUP_INFEASIBLE: Explanation(
            means=(
                "The CPUs and GPUs that the trainer reserves (a placement group) do not fit on Ray's nodes, so the"
                " trainer would wait forever."
            ),
            advice="Check gpusPerNode and the CPUs under spec.pools[].resources.",
        ),
        Reason.SUBMITTING: Explanation(
            means="The operator has submitted the trainer to Ray, and Ray does not list it yet.",
            advice="Wait; the trainer starts in the head pod.",
        ),
        Reason.SUBMITTED: Explanation(
            means="Ray has accepted the trainer.",
            advice="Nothing to do.",
        ),
        Reason.SUBMISSION_FAILED: Explanation(
            means=(
                "If JobSubmitted has this reason: Ray rejected the submission of the trainer. The operator retries"
                " until `runPolicy.provisioningDeadlineSeconds` have passed. If the job is Failed with this reason: Ray"
                " accepted the trainer, but could not start its process."
            ),
            advice="Read Ray's response in the message, and check that the image (spec.image) contains the trainer.",
        ),
        Reason.DRIVER_LOST: Explanation(
            means=(
                "Ray no longer lists the trainer (in Ray's words, the driver) that it had accepted, because the Ray"
                " head restarted."
            ),
            advice=f"{RETRY} If it happens again, check whether the head pod ran out of memory.",
        ),
        Reason.STARTING: Explanation(
            means="The trainer is running and has not started its first step.",
            advice="Wait; the trainer loads the model and creates its workers. `rljob logs` shows its progress.",
        ),
        Reason.TRAINING: Explanation(
            means="The trainer executes training steps.",
            advice="Nothing to do.",
        ),
        Reason.STOPPING: Explanation(
            means="The trainer was asked to stop: by the operator, by the termination of its pod, or through Ray.",
            advice="Wait; the trainer saves a checkpoint, if training has started, and exits.",
        ),
        Reason.RUN_STATE_UNREADABLE: Explanation(
            means="The operator cannot read the trainer's run state, so its progress is unknown.",
            advice=(
                "The message says what cannot be read. If it names a contract version, use an image of the operator's"
                " version. The job fails if the trainer's state is unknown for `runPolicy.stallDeadlineSeconds`."
            ),
        ),
        Reason.STALLED: Explanation(
            means="The trainer made no progress for `runPolicy.stallDeadlineSeconds`.",
            advice=(
                "The message says where it stopped. The stacks of all processes are in the job's storage, in"
                " `run/logs/attempt-N/stacks-*.txt`. Increase the deadline if a step of this job takes that long."
            ),
        ),
        Reason.ENDED: Explanation(
            means="If Retrying has this reason: the job has finished. Otherwise: the attempt has ended.",
            advice="Nothing to do; the conditions Retrying, Suspended, Complete and Failed say what comes next.",
        ),
        Reason.NO_CHECKPOINT_YET: Explanation(
            means="The trainer has not saved a complete checkpoint yet.",
            advice=(
                "Wait for step spec.checkpoint.everySteps. A failure before the first checkpoint restarts from step 0."
            ),
        ),
        Reason.SAVED: Explanation(
            means="There is a complete checkpoint.",
            advice="Nothing to do.",
        ),
        Reason.NO_ALARMS: Explanation(
            means="The trainer reports no alarm: its metrics are in their usual range.",
            advice="Nothing to do.",
        ),
        Reason.NOT_REPORTED: Explanation(
            means=(
                "It is not known whether there are alarms: the trainer in the job's image is older than this operator,"
                " or could not compute them (then its log has a warning)."
            ),
            advice="Nothing to do; to get alarms, use an image of the operator's version.",
        ),
        Reason.REWARD_ERRORS: Explanation(
            means=(
                "A reward gave no score for many responses of the last ten steps, more than a quarter of"
                " `training.maxFailureRate`: it raised an error, exceeded its time limit, lost its process or could not"
                " reach a service. Usual is 0 %."
            ),
            advice=(
                "Read the first failure of each kind in `logs/` of the run folder (on a cluster: `rljob get-results"
                " NAME --only logs`), and fix the reward or the service. Above `training.maxFailureRate` the run ends."
            ),
        ),
        Reason.RESPONSES_EXCLUDED: Explanation(
            means=(
                "The rollout engine or the environment did not complete many responses of the last ten steps, more"
                " than a quarter of `training.maxFailureRate`, so these were excluded. Usual is 0 %."
            ),
            advice=(
                "Read the logs of the workers and of the environment in `logs/` of the run folder (on a cluster: `rljob"
                " get-results NAME --only logs`), and fix the cause. The metrics `outcome/...` show how responses"
                " ended."
            ),
        ),
        Reason.HIGH_GRADIENT_NORM: Explanation(
            means=(
                "In several steps the norm of the policy's gradient was far above its usual range in this run, and"
                " above `optimizer.maxGradientNorm`; or it was not finite."
            ),
            advice=(
                "Reduce `optimizer.learningRate`. If the score has fallen, continue from a checkpoint before the alarm."
                " A reward with very large scores has the same effect."
            ),
        ),
        Reason.HIGH_KL: Explanation(
            means=(
                "In several steps the KL divergence of policy and reference was above 1 nat per token, and far above"
                " its earlier values: the policy moves away from the original model quickly."
            ),
            advice=(
                "Reduce `optimizer.learningRate` or increase `algorithm.kl.coefficient`, and read responses in"
                " `samples.jsonl`: often the policy exploits the reward."
            ),
        ),
        Reason.ROLLOUT_MISMATCH: Explanation(
            means=(
                "The log-probabilities of the rollout engine and of the trainer differ by more than 1e-3 nats (Float32)"
                " or 0.05 nats (BFloat16) on average, although both use the same weights, so training is off-policy."
            ),
            advice=(
                "To find the cause try, one at a time, `rollout.compile: Never`, `model.dtype: Float32` and"
                " `rollout.engine: HuggingFace`; or correct for it with `algorithm.rolloutCorrection`"
                " (docs/rollout-correction.md)."
            ),
        ),
        Reason.TOKENS_REJECTED: Explanation(
            means=(
                "In several steps `algorithm.rolloutCorrection.rejection` excluded more than half of the tokens from"
                " the update."
            ),
            advice="Widen its bounds, or synchronize the weights more often (`rollout.syncEverySteps`).",
        ),
        Reason.ADAPTERS_ROUNDED: Explanation(
            means=(
                "The rollout engine gets LoRA adapters merged into 16-bit weights, and rounding loses more than 10 % of"
                " what the adapters add. So the policy that generates differs from the policy that is trained."
            ),
            advice=(
                "Set `model.lora.sync: Adapter` (requires `rollout.engine: VLLM`), or `model.dtype: Float32`"
                " (docs/lora.md). In the first steps of a run it is usual, because the adapters are still small."
            ),
        ),
        Reason.RESPONSES_CUT_OFF: Explanation(
            means=(
                "In several steps more than half of the responses were truncated at the token limit, before the model"
                " ended them. Their answer is often missing."
            ),
            advice=(
                "Increase `rollout.maxNewTokens` (with an environment also `maxTurnTokens` or `maxContextTokens`), or"
                " ask for shorter responses in the prompt."
            ),
        ),
        Reason.EQUAL_SCORES: Explanation(
            means=(
                "In several steps nearly all groups had equal scores, and not because the policy solves the prompts."
                " The policy learns nothing from such a group; dynamic sampling drops it."
            ),
            advice=(
                "Use prompts that the model sometimes solves, a reward with partial credit, or a larger"
                " `rollout.groupSize`. Check in `samples.jsonl` that the reward finds the answers."
            ),
        ),
        Reason.OTHER_ALARM: Explanation(
            means="The trainer reports an alarm that this version does not know; the message has its name.",
            advice="Read the message, and docs/training-health.md of the trainer's version.",
        ),
        Reason.SUSPENDING: Explanation(
            means=(
                "The job is being suspended: the trainer saves a checkpoint, if training has started, then the operator"
                " deletes the cluster."
            ),
            advice=(
                "Wait; the trainer has `runPolicy.gracePeriodSeconds` to save, and then the pods have the same time to"
                " terminate."
            ),
        ),
        Reason.SUSPENDED: Explanation(
            means="The job is suspended (`spec.suspend`): its pods are deleted, so their GPUs are free.",
            advice="To resume it from its newest checkpoint, run `rljob resume`.",
        ),
        Reason.RESIZED: Explanation(
            means=(
                "The job ran with fewer worker pods than it requests (`runPolicy.elastic`), and all have been ready for"
                " `growAfterSeconds`. It was stopped with a checkpoint and resumes with all worker pods."
            ),
            advice="Nothing to do.",
        ),
        Reason.RESUMED: Explanation(
            means="The job is no longer suspended: it has resumed or finished.",
            advice="Nothing to do.",
        ),
        Reason.SUCCEEDED: Explanation(
            means="All training steps are completed.",
            advice=(
                "Nothing to do; the newest checkpoint is at status.checkpoint.uri, and the model, if it was exported,"
                " at status.exportUri."
            ),
        ),
        Reason.PROVISIONING_DEADLINE_EXCEEDED: Explanation(
            means=(
                "The trainer did not run within `runPolicy.provisioningDeadlineSeconds` after its RayCluster was"
                " created or admitted by a queue (or, if it was not created, after the start of the attempt). The job"
                " never ran before, and nodes and ResourceQuota were not the cause."
            ),
            advice=(
                "The message says what the job was waiting for. Fix the cause or increase the deadline, then run"
                " `rljob retry`."
            ),
        ),
        Reason.ACTIVE_DEADLINE_EXCEEDED: Explanation(
            means=(
                "The job did not finish within `runPolicy.activeDeadlineSeconds`, the limit for all attempts together."
                " A running trainer was asked to stop, and had `runPolicy.gracePeriodSeconds` to save."
            ),
            advice=(
                "Increase the deadline, then run `rljob retry`: the job resumes from the checkpoint in the message."
            ),
        ),
        Reason.CONFIGURATION_ERROR: Explanation(
            means="The trainer exited with code 2: the job cannot work as it is written.",
            advice=(
                "Correct the field in the message and create the job again. If the cause is outside the job, such as a"
                " missing file, fix it and run `rljob retry`."
            ),
        ),
        Reason.APPLICATION_ERROR: Explanation(
            means=(
                "The training or user code failed: the trainer exited with code 1, or with an exit code or signal that"
                " has no other reason, such as SIGSEGV."
            ),
            advice="Read the error or the end of the log in the message; `rljob logs` prints the whole log.",
        ),
        Reason.INFRASTRUCTURE_ERROR: Explanation(
            means=(
                "If an attempt or the job failed: the trainer exited with code 75, was killed by SIGKILL or SIGTERM, or"
                " was lost by Ray, or nodes were slow or failed before it ran. If ClusterReady is False: a pod failed,"
                " its node is lost or cannot create its sandbox or network, or the API server or a webhook fails."
            ),
            advice=f"The job itself is not at fault; the message has the cause. {RETRY}",
        ),
        Reason.OUT_OF_MEMORY: Explanation(
            means="The kernel killed a container of the job because it exceeded its memory limit (`OOMKilled`).",
            advice=(
                "Increase the memory under spec.head.resources or spec.pools[].resources, or reduce batch sizes or"
                f" response lengths: {CREATE_AGAIN}"
            ),
        ),
        Reason.DISRUPTED: Explanation(
            means=(
                "Kubernetes removes a pod of the job: a pod of higher priority needs its place, its node is drained, or"
                " its node runs out of a resource."
            ),
            advice=(
                "Nothing to do: the trainer is asked to save a checkpoint, and after a backoff the next attempt resumes"
                " from the newest one without using a retry."
            ),
        ),
        Reason.STOPPED_THROUGH_RAY: Explanation(
            means=(
                "The trainer was asked to stop through Ray's API (`ray job stop`) or by a signal, not by the operator."
                " It handled the request and exited with code 130."
            ),
            advice="To resume it from its newest checkpoint, run `rljob retry`.",
        ),
        Reason.STOPPED_BY_USER: Explanation(
            means="A user stopped the job (`rljob stop`); the trainer had `runPolicy.gracePeriodSeconds` to save.",
            advice="To resume it from its newest checkpoint, run `rljob retry`.",
        ),
        Reason.EXITED_WITHOUT_RESULT: Explanation(
            means="The trainer exited with code 0, but its run state does not report that the training is complete.",
            advice=(
                "Read `rljob logs`. Usual causes are an image with another version of the trainer, and code that ends"
                " the process (`os._exit`)."
            ),
        ),
    }
)
