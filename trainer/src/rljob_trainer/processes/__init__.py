"""Processes that run user code, such as rewards and environments.

`child_process.py` is the parent's side of one process, `child_program.py` the process's own side. `wire.py` encodes
what both exchange. `time_limit.py` decides when a call has taken too long.
"""
