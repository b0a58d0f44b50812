"""What is on a GPU in each phase of a run, owner by owner, and what to change where it is too much.

`phases` has the whole: begin there, beside the table of docs/memory.md. It adds up `train_state` (tensors, their
shards, what stays), `train_activations` (bytes of a token), `train_passes` (the peak of a pass on top), and the
engine's memory (`rljob_planner.kv_cache`). `changes` lists the fields that need less memory, or less time; `knobs`
tries them until it fits.
"""
