"""Generates the CustomResourceDefinition and two pages of `docs/` from the contract types."""
