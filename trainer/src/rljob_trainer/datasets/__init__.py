"""Loads the prompts of a dataset block, and determines the order in which they are drawn.

Read `rows.py` first (and the file of each source), then `prompts.py`, then `cursor.py`.
"""
