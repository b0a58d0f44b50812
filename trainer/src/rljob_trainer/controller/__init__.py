"""The single controller.

`build_run.py` puts a run together: it checks the job (`run_checks.py`), loads its prompts (`prompt_sets.py`), and
starts its workers (`run_workers.py`) in the roles that `model_roles.py` makes of the job. `controller.py` is the loop
of a run, `training_step.py` one step.
"""
