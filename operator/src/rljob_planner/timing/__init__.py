"""How long each phase of a step takes, and what bounds it.

Begin with `step`: which phases follow each other and which run at the same time. It uses `generation` (with `lengths`
of responses), `passes` (passes without backward, updates, the optimizer) and `communication` (links, FSDP2, weight
sync).
"""
