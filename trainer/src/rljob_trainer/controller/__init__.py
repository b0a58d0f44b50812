"""The single controller process, which drives all workers.

`build_run.py` sets up a run: it checks the job (`checks`), loads the prompts (`prompt_sets.py`), derives the
roles from the job (`model_roles.py`), and starts the workers (`run_workers.py`). `controller.py` is the training loop,
`training_step.py` is one step.
"""
