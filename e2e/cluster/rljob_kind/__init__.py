"""Makes the kind cluster of the end-to-end tests: `__main__.py`, then `cluster.py`, `images.py`, `kuberay.py`."""
