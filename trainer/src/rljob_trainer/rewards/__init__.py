"""Scores for responses. Each scorer runs in processes of its own; the controller does not import a user's scorer.

`base.py` defines a reward's input and output; `loading.py` finds the scorer of an entry in the job. The rewards:
`exact_match.py`, `math_answer.py`, `format.py`, `reasoning_gym.py`, `overlong.py`, and `function.py` for a user's own
function. `code.py` runs the code of a response in the package `sandbox`; `code_tests.py` reads the tests of a row, and
`code_comparison.py` compares the output with the expected one. `services/judge.py` and `services/reward_server.py` call
an HTTP service; `services/service.py` has their limits and retries, `services/scorers.py` and `services/settings.py`
their settings. `final_message.py` removes thinking and special tokens from a response.
Parts of `math_answer.py`: `final_answer.py` (with `math_context.py`) finds the answer in a response, `math_values.py`
(with `math_numbers.py`, `math_units.py`, `math_text.py`) parses it, `math_equality.py` (with `math_sympy.py`) compares
it with the row's answer, and `answer_values.py` checks the row's answer.
How scorers run: `process_pool.py` (with `pool_slots.py`) and `scoring_child.py` in the worker process,
`scoring_program.py` (with `scoring_results.py`, and `async_program.py` for asynchronous scorers) in the scoring
processes, both built on the package `processes`. `unreachable.py` recognizes exceptions that mean that a service is
unreachable. `scorer_environment.py` chooses the environment variables. `error_policies.py` says what happens after a
failure.
"""
