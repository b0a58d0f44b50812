"""The commands for jobs on a Kubernetes cluster. They print what `rljob` does; only `rljob.cluster` sends requests."""
