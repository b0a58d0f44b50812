"""Compares our algorithms with numbers that verl computed."""
