"""Scores for responses. Every scorer runs in processes of its own; nothing of it is imported by the controller.

`base.py` says what a reward is given and gives; `loading.py` makes it from a job's entry. The rewards that are there:
`exact_match.py`, `math_answer.py`, `format.py`, `reasoning_gym.py`, and `function.py` for a user's own;
`final_message.py` takes thinking and special tokens out of a response.
How they run: `process_pool.py` here, `scoring_program.py` and `scoring_child.py` in the processes, `wire.py` between
them. What becomes of one that fails says `workers/reward.py`.
"""
