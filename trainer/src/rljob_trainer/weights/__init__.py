"""Trained weights on their way to a rollout engine: `sync.py` (also with trained adapters added to
them, or the adapters alone), and `buckets.py` (whole tensors out of shards)."""
