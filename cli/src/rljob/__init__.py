"""The Python client of RLJob."""
