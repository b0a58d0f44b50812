"""Runs tests on one device, with pytest or without."""
