"""What is on a GPU in each phase of a run, owner by owner, and what to change where it is too much.

`phases` has the whole: the phases of one pool, from the owners below; begin there, beside the table of docs/memory.md.

- A train engine: `train_tensors` (tensors, their shards, and their size while gathered), `train_state` (what stays:
  parameters, gradients, moments), `train_activations` (bytes of a token), `train_passes` (the peak of a pass on top,
  gradients that are still whole among it).
- `rollout_engine`: when an engine has what. How large its weights and KV cache are is `rljob_planner.kv_cache`.
- `host`: what is offloaded, in the node's own memory.
- `changes` lists the fields that need less memory, and the job with each; `knobs` tries them until it fits.
"""
