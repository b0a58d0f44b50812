"""Checks of a job that need its model, its data or the user's code. They run before devices are reserved."""
