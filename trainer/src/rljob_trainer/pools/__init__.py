"""Resource pools: choose nodes for all pools of a run, and reserve all of them or none. From the job down to Ray:
`pool_manager.py`, `resource_pool.py`, `reservation.py` (Ray placement groups), `fitting.py` (chooses nodes, or explains
what is missing; pure functions)."""
