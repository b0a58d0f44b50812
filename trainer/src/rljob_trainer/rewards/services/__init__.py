"""Rewards that call a service: judges and reward servers."""
