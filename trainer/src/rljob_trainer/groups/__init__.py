"""Worker groups: the methods of a role, called on all of its worker processes.

From the controller down to the worker: `worker_group.py`, `worker_processes.py`, `ray_worker.py` (the Ray actor),
`worker_side.py` (inside the worker process). Next to them: `ray_session.py` (connection to Ray), `calls.py` (pending
calls), `object_store.py` and `kept_results.py` (data), `liveness.py` and `death.py` (dead processes and their cause).
"""
