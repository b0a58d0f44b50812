"""Observe, reconcile, act: one pass per key of the work queue."""
