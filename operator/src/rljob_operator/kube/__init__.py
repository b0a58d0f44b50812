"""All requests to the Kubernetes API server, and the reading of its objects."""
