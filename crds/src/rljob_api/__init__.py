"""The contract of RLJob: what the command line, the operator and the trainer agree on.

Nothing here imports more than pydantic and the YAML reader, so that every other distribution can depend on it.
"""
