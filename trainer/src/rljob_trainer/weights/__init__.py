"""Weight synchronization from a training engine to the rollout engine in the same process: `sync.py` sends weights
without adapters, weights with merged adapters, or adapters alone; `buckets.py` gathers whole tensors from shards."""
