"""`rljob run`: runs a job on this machine, or on an existing Ray cluster."""
