"""The operator's process: leader election, watches and relists that put jobs on the work queue, health and metrics."""
