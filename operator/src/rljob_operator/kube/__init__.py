"""Requests to the Kubernetes API server, and the parsing of its objects. Only watches are elsewhere, in `handlers`."""
