"""A run beside what was planned for it, and what to change.

What a run says: `run_facts` (from lines of metrics.jsonl), `observed_lengths`, `timeline_facts`. What is made of it:
`comparison` (predicted beside measured, with `process_memory` on CPUs), `faster_jobs` (the fields that may shorten a
step), `tuning` (each of them worked out anew: the advice, and findings); `run_report` is all of these together.
`calibrated_machine` fits constants to runs: which constants and which steps; the fit itself is
`rljob_planner.calibration`.

Folders are read by the command line: rljob_cli/plan/run_folder.py.
"""
