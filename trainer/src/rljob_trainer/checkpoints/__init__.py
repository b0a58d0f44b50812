"""Checkpoints that are either complete or absent, load on any number of ranks, and contain no pickle.

The library does not use Ray or a training engine: it stores named tensors that are sharded over ranks, plus JSON state.
A start calls `find_newest_complete`, `announce_start`, `load_into` on every rank, `accept_up_to`. A save calls
`begin_save`, `save_shard` on every rank, `commit`, `prune`.
"""
