"""Tests of one device, with pytest and without."""
