"""Runs reconcile passes, one for each key from the work queue: observes a job, decides, and acts."""
