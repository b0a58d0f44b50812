"""Runs and steps of the trainer: real ones, replayed ones, and parts of them."""
