"""Memory of one GPU in each phase of a run, by owner, and changes that reduce it.

Begin with `phases`, next to the table of docs/memory.md. It adds up `train_state` (shards of parameters, gradients and
moments), `train_passes` (the peak of a pass on top of them, from `train_activations`: bytes per token), and the rollout
engine's memory (`rljob_planner.kv_cache`). `job_changes` lists fields of the job file that reduce memory or time;
`proposals` searches them for changes that make the job fit.
"""
