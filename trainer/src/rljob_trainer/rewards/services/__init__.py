"""Rewards that call a service over HTTP.

`scorers.py` has the scorers and `settings.py` their settings; only the scoring processes of these rewards import the
rest: `judge.py` and `remote.py`, and `http_service.py` with limits and retries.
"""
