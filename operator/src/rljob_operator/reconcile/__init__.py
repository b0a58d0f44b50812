"""What becomes of a job: pure decisions from what was observed. To be read from `reconcile` on.

| question | modules |
|---|---|
| what happened | `observed` as seen, and what it means: `cluster`, `trainer`, `endings` (with whose fault one is) |
| should it stop | `stops`: people, suspension, active deadline, stall, nodes that are back, deadlines |
| what comes next | `retries`: another attempt, and when, or the end of the job |
| | `between_attempts`: pauses, suspension, what people ask for |
| what is created, and removed | `creation`: nodes, cluster, submission; `cleanup`: clusters, and at last the job |
| what is reported | `status_draft`: records, conditions, phase and reason; `plan_types`: effects and events |

| condition | decided in |
|---|---|
| SpecValid | `reconcile` |
| ClusterReady | `cluster`, `between_attempts`, `cleanup` |
| PlacementFeasible | `cluster` |
| JobSubmitted, Progressing, Checkpointed | `trainer` |
| Suspended | `between_attempts` |
| Retrying, Finished, Complete, Failed | `retries` |
"""
