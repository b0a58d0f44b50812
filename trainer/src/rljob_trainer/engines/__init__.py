"""What computes on a device, without knowing Ray: `train` passes tokens through sharded models and updates them with
FSDP2, `rollout` generates with vLLM or transformers. The `__init__.py` of each says where to begin.

`process_group.py` joins the ranks of both; `device_memory.py` measures what tensors take and gives room for a cache.
"""
