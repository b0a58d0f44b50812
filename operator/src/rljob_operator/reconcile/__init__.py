"""What becomes of a job: pure decisions from what was observed. To be read from `reconcile` on.

| record | decided in |
|---|---|
| an attempt's beginning and end | `attempts`, with reasons of `endings`, `deadline` and `stops` |
| what follows from its end: retries, the end of the job | `retries`, by `failure_classes` |
| the time without an attempt: pauses, suspension, requests of people | `between_attempts`, `suspension` |
| what is removed | `cleanup` |

| condition | decided in |
|---|---|
| SpecValid | `reconcile` |
| ClusterReady | `cluster`, `between_attempts`, `cleanup` |
| PlacementFeasible | `placement` |
| JobSubmitted | `submission` |
| Progressing, Checkpointed | `progress`, with `silence` |
| Suspended | `suspension` |
| Retrying, Finished, Complete, Failed | `retries` |
"""
