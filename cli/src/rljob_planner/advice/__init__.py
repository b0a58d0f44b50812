"""Compares a run with its plan (`run_facts`, `comparison`), suggests changes (`tuning`), and fits constants to runs
(`calibration`). The command line reads the folders of runs.
"""
