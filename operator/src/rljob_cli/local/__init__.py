"""`rljob run`: a job on this machine, or on a Ray cluster."""
