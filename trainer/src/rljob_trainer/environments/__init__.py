"""Conversations of the policy with environments: processes that run the user's code, tokens, and the rollouts."""
