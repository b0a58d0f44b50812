"""The single controller.

`build_run.py` puts a run together, `controller.py` is its loop, `training_step.py` one step.
"""
