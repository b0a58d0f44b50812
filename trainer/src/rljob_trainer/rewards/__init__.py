"""Scores for responses. Every scorer runs in its own processes; the controller does not import its code.

`base.py` defines a reward's input and output; `loading.py` finds the scorer of an entry in the job. The rewards:
`exact_match.py`, `math_answer.py`, `format.py`, `reasoning_gym.py`, and `function.py` for a user's own function.
`final_message.py` removes thinking and special tokens from a response.
How they run: `process_pool.py` and `scoring_child.py` in the worker process, `scoring_program.py` in the scoring
processes; `wire.py` encodes what they exchange. `workers/reward.py` decides what happens after a failure.
"""
