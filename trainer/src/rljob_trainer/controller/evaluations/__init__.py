"""Evaluations, their metrics, and the best checkpoints."""
