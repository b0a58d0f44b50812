"""Worker groups: the methods of a role, called on all of its worker processes.

From the controller down to the worker: `worker_group.py`, `worker_processes.py`, `ray_worker.py` (the Ray actor),
`worker_side.py` (inside the worker process), `fused_worker.py` (the workers of all roles of a process). Next to them:
`ray_session.py` (connection to Ray), `nsys.py` (processes under a profiler), `calls.py` (pending calls),
`object_store.py` and `result_cache.py` (data), `liveness.py` and `worker_failure.py` (dead processes, and why they
died), `shared_folders.py` and `devices.py` (checks of a worker's folders and GPU), `stacks_of_nodes.py` (stack traces
of all processes).
"""
