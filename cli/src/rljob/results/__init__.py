"""Copies results of a job from its claim to this machine, through a pod that belongs to the user."""
