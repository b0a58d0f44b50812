"""The commands for jobs on a Kubernetes cluster; `client` alone asks its API server."""
