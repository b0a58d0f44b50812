"""How long each phase of a step takes, and what bounds it.

`step` has the whole: what follows what, and what goes on beside what. It asks `generation` (with `lengths` of
responses), `passes` (forward passes, updates, the optimizer) and `communication` (links, FSDP2, the hand-over of
weights).
"""
