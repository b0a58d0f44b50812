"""Worker groups: the methods of a role, called on all of its worker processes.

From the controller down to the worker: `worker_group.py`, `worker_processes.py`, `ray_worker.py` (the Ray actor),
`worker_side.py` (inside the worker process). Next to them: `ray_session.py` (connection to Ray), `calls.py` (pending
calls), `object_store.py` and `result_cache.py` (data), `liveness.py` and `worker_failure.py` (dead processes, and why
they died).
"""
