"""Worker groups: a role's methods, called on all of its processes.

From the controller down: `worker_group.py`, `worker_processes.py`, `ray_worker.py` (the actor), `worker_side.py` (in
its process). Beside them `ray_session.py` (the connection), `calls.py`, `object_store.py` and `kept_results.py` (data),
`liveness.py` and `death.py` (what became of a process).
"""
