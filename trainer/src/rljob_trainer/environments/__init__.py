"""Environments: conversations of several turns between the policy and an object of a user's class.

How the user's code runs: `environment_pool.py` gives each rollout a place in a process, `environment_process.py` is the
parent's side of one process, and `environment_program.py` the program of a process. Parts of the program: `rollouts.py`
answers requests, `user_calls.py` calls the user's methods, `returned_values.py` checks what they return, and
`random_states.py` separates the random numbers of rollouts. `description.py` finds out what a class offers, `probe.py`
does this at the start of a run. `failures.py` has the errors.
"""
