"""Results of a job on a cluster: a pod of the user reads them from the job's claim, and they are copied from there."""
