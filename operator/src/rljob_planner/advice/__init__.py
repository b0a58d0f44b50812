"""A run beside what was planned for it, and what to change: `run_facts`, `comparison`, `tuning`; constants that are
fitted to runs: `calibration`. Folders are read by the command line.
"""
