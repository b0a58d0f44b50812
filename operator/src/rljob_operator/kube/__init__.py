"""All Kubernetes HTTP."""
