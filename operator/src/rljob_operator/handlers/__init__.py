"""From Kubernetes events to keys on the work queue."""
