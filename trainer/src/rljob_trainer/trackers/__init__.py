"""Trackers: W&B and MLflow, which keep and show the metrics of many runs.

`trackers.py` starts a process per tracker (`tracker_process.py`) and sends it messages. If a process is slow, hangs or
ends, up to 32 MiB of messages wait in memory; further ones are dropped. `tracker_program.py` is the program of the
process; it translates the messages (`messages.py`) for W&B (`wandb_run.py`) or MLflow (`mlflow_run.py`).
`tracker_checks.py` runs before the libraries are loaded: it finds missing packages and missing credentials.
"""
