"""Creates the kind cluster of the end-to-end tests. Read `__main__.py` first, then `cluster.py`, `images.py`,
`kuberay.py`."""
