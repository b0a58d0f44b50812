"""The contract of RLJob: what the command line, the operator and the trainer agree on.

This package needs only pydantic and the YAML reader, so that every other distribution can depend on it.
"""
