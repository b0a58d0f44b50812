"""What computes on a device: `train` (FSDP2) and `rollout` (vLLM, or transformers)."""
