"""Loads the prompts of a dataset block, and determines the order in which they are drawn.

Read `rows.py` first (and the file of each source), then `row_values.py`, `prompts.py` and `loading.py`, then
`cursor.py`, `pass_rates.py` and `mixture.py`. Datasets that are too large for memory: `parquet_files.py`,
`short_prompts.py`, `filter_processes.py`, `row_index.py`, `indexed_rows.py`.
"""
