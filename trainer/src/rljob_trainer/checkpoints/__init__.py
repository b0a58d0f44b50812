"""Checkpoints that are complete or absent, load on any number of ranks, and contain no pickle.

The library knows neither Ray nor a training engine: it stores named tensors that are spread over ranks, plus JSON
state. The order of a save is `start_attempt` (once), then for each step `begin_save`, `save_shard` on every rank,
`commit`, `prune`; the order of a resume is `find_newest_complete`, `start_attempt`, `load_into` on every rank.
"""
