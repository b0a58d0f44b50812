"""How long each phase of a step takes, and what bounds it.

`step` has the whole: what follows what, and what goes on beside what. It asks `roles`, a function for each role's part
of a step, which asks

- `generation` (an engine's speed and all responses), with `lengths` (how long responses are) and `makespan` (decoding
  from finish to finish);
- `passes` (operations of forward passes and updates, the optimizer), with `communication` (bytes that FSDP2 gathers and
  reduces, their seconds);

and `weight_sync` for the hand-over of weights. `costs` is what all of them answer with, and knows the links.
"""
