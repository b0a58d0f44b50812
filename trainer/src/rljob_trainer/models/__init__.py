"""Finds the model that a job names and provides it as a folder on this machine.

Read `source.py` first (and `download.py`, `gguf_conversion.py`), then `tokenizer.py`. The `engines` package builds and
shards models.
"""
