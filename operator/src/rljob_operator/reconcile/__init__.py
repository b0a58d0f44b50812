"""What becomes of a job: pure decisions from what was observed."""
