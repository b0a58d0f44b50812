"""Checkpoints that are complete or absent, load on any number of ranks, and contain no pickle.

The library knows neither Ray nor a training engine: it stores named tensors that are spread over ranks, plus JSON
state. The order of a start is `find_newest_complete`, `announce_start`, `load_into` on every rank, `accept_up_to`; that
of a save is `begin_save`, `save_shard` on every rank, `commit`, `prune`.
"""
