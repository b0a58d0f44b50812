"""What becomes of a job: pure decisions from what was observed. To be read from `reconcile` on.

| record | decided in |
|---|---|
| an attempt's beginning and end | `attempts`, with reasons of `endings`, `deadline` and `stops` |
| on which nodes it runs, and when it goes back to all | `elastic`; which numbers are valid: `v1alpha1.elastic` |
| that its trainer is to stop, and asking it | `stops`: people, suspension, deadline; `stall`: no progress; `elastic` |
| since when nothing is learned of its trainer, or nothing has come of it | `silence` |
| what follows from its end: another try, tries given back, the end of the job | `retries`, by `failure_classes` |
| how long the pause before a try is (back-off) | `retries` |
| the time without an attempt: the end of a pause, suspension, requests of people | `between_attempts`, `suspension` |
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
