"""Resource pools: which nodes take which pools, all reserved or none. From the job down: `pool_manager.py`,
`resource_pool.py`, `reservation.py` (Ray placement groups), `fitting.py` (which node takes which pool, or what is
missing; pure)."""
