"""Decides what happens next to a job. Start reading at `reconcile`.

No function here does I/O or reads a clock. Most of them change the `StatusDraft` that they are given, and nothing else.

| question | modules |
|---|---|
| what has happened? | `observed` holds the facts; `cluster`, `trainer` and `attempt_endings` judge them |
| should the attempt stop? | `stops`: user request, suspension, deadlines, stall, restored nodes |
| what comes next? | `retries`: another attempt, and when, or the end of the job |
| | `between_attempts`: backoff, suspension, requests by annotation |
| what is created or deleted? | `creation`: nodes, cluster, submission; `cleanup`: clusters, finally the job |
| what is reported? | `status_draft`: records, conditions, phase, reason; `decision`: effects and events |

| condition | decided in |
|---|---|
| SpecValid | `reconcile` |
| ClusterReady | `cluster`, `between_attempts`, `cleanup` |
| PlacementFeasible | `placement` |
| JobSubmitted, Progressing, Checkpointed | `trainer` |
| Suspended | `between_attempts` |
| Retrying | `retries`, `between_attempts` |
| Finished, Complete, Failed | `retries` |

When an attempt starts or ends, or the job ends or is reopened, `retries` also sets to False, or removes, the conditions
that no longer hold.
"""
