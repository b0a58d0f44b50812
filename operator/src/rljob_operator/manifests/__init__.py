"""Builds the manifests of the objects that the operator creates. Pure."""
