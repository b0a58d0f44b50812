"""Attacks on the sandbox of the reward Code."""
