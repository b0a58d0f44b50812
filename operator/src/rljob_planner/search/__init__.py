"""The best placement of roles over the GPUs of a cluster.

`mapping` has the whole. Below it, in the order in which it is worked out:

1. Of one role: `role_layouts` (sizes of pools, layouts allowed there), `role_choices` (their seconds and bytes).
2. Of roles that share GPUs: `set_choices` (combinations that fit), `set_tables` (for every set and size of pool).
3. Of all: `partitions` (which roles share), `arrangements` (sizes and kinds), `label_setting` (the best option for each
   set, by labels: a dynamic programme). These and `options` know numbers only, nothing of models.
4. What is shown: `ranking` and `fewer_gpus` (ties, simpler ones, why the others lose), `nearest_miss` (where nothing
   fits), `results` (the types).
"""
