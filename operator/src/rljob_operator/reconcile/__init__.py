"""What becomes of a job: pure decisions from what was observed.

| condition | decided in |
|---|---|
| SpecValid | `reconcile` |
| ClusterReady | `cluster`, `cleanup` |
| PlacementFeasible | `placement` |
| JobSubmitted | `submission` |
| Progressing, Checkpointed | `progress` |
| Complete, Failed | `attempts`, with reasons of `endings` and `deadline` |
"""
