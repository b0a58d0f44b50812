"""Weight synchronization from the trainer to a rollout engine: `sync.py` sends whole weights, weights with merged
adapters, or adapters alone; `buckets.py` gathers whole tensors from shards."""
