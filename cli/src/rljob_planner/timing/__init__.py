"""Computes how long each phase of a step takes, and what limits its speed.

Begin with `step`. It knows which phases follow each other and which run at the same time. It uses `generation` (with
`lengths`: the distribution of response lengths), `passes` (passes without backward, updates, the optimizer) and
`communication` (links between GPUs, FSDP2, weight sync).
"""
