"""The best placement of roles over the GPUs of a cluster.

`mapping` has the whole. It asks `pool_options` what roles may cost together on a pool, `arrangements` for the best
pools of each grouping of roles, and `ranking` for their order and what is to be said of them.
"""
