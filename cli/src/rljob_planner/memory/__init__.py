"""Memory of one GPU in each phase of a run, by owner, and changes of the job that reduce this memory.

Begin with `phases`, and read it beside the table of docs/memory.md. It adds up `train_state` (shards of parameters,
gradients and moments), `train_passes` (the additional memory at the peak of a pass; `train_activations` has the bytes
per token), and the rollout engine's memory (`rljob_planner.kv_cache`). `host_state` has the host memory of a node.
`job_changes` lists changes of the job file that reduce memory or time. `proposals` searches them for changes that make
the job fit.
"""
