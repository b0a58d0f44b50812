"""Trained weights on their way to a rollout engine: `sync.py`, and `buckets.py` (whole tensors out of shards), and
`adapters.py` (those with trained adapters added to them, or the adapters alone)."""
