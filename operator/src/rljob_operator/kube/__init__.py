"""Requests to the Kubernetes API server, and the parsing of its objects. `handlers.watches` has the watches."""
