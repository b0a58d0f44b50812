"""Trained weights on their way to a rollout engine: `sync.py`, and `buckets.py` (whole tensors out of shards)."""
