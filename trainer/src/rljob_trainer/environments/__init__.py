"""Environments: conversations of the policy with several turns."""
