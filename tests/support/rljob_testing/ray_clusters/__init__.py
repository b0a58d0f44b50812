"""Ray on this machine, and workers on it."""
