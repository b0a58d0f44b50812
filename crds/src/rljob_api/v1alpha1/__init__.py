"""The schema of an RLJob.

`job.py`, then `spec.py` and a file for each of its blocks, with the rules within the block. Rules between blocks are in
`*_rules.py` and `optional_roles.py`; `rules.py` has all rules, and asks them.
"""
