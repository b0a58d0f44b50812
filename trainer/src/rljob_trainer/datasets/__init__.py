"""From a dataset block to prompts, and the order in which they are visited.

`rows.py` (and a file for each source), then `prompts.py`, then `cursor.py`.
"""
