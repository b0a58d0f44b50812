"""The schema of an RLJob.

Start with `job.py` and `spec.py`. Each block has its own file, with the rules within the block. Rules between blocks
are in `*_rules.py` and `optional_roles.py`; `rules.py` collects all rules and evaluates them.
"""
