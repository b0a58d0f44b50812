"""The code that computes on devices, independent of Ray: `train` runs and updates sharded models with FSDP2, `rollout`
generates with vLLM or transformers. Read the `__init__.py` of each package first.

Both use `process_group.py`, the process group of all ranks, and `device_memory.py`, which measures tensors and makes
room for a KV cache."""
