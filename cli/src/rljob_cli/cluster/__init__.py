"""The commands for jobs on a Kubernetes cluster. Most of them print what `rljob` returns."""
