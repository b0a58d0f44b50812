"""The code that computes on devices, independent of Ray: `train` runs and updates sharded models with FSDP2, `rollout`
generates with vLLM or transformers. Read the `__init__.py` of each first.

`process_group.py` joins the ranks of both; `device_memory.py` measures tensors and makes room for a KV cache.
"""
