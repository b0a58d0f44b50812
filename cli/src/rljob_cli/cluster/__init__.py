"""The commands for jobs on a Kubernetes cluster. Only `client` sends requests to the API server."""
