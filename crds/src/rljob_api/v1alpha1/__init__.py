"""The schema of an RLJob.

`job.py`, then `spec.py` and a file for each of its blocks; rules between fields in `*_rules.py`, asked by
`rules.py`.
"""
