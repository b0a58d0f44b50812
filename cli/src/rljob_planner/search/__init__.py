"""Finds the best placement of a job's roles on the GPUs of a cluster.

Begin with `best_placement`. It uses `pool_options` (memory and time of roles that share a pool), `arrangements` (the
best pools for each grouping of roles) and `ranking` (the order of the results, and why each is not the first).
"""
