"""The model that a job names, as a folder on this machine.

`source.py` (and `download.py`, `gguf_conversion.py`), and its `tokenizer.py`. Building and sharding it is the work of
`engines`.
"""
