"""Scores for responses. Every scorer runs in processes of its own; nothing of it is imported by the controller."""
