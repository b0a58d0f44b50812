"""The schema of an RLJob.

Start with `job.py` and `spec.py`. Each block of the spec has a file, with the rules between fields of this block. Rules
between blocks are in `*_rules.py` and `optional_roles.py`. `rules.py` collects all rules and evaluates them.
"""
