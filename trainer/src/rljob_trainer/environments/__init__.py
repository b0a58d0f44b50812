"""Rollouts of several turns with environments: the user's classes and agents.

- A rollout: `host`, `episode`, `engine_client`, `kinds`, `settings`.
- Tokens: `conversation`, `turn_template`, `template_check`, `tool_calls`, `transcript`.
- Processes of the user's code: `environment_pool` and `environment_process` (here), `environment_program`,
  `user_objects`, `user_calls`, `agent_runs` (there), `description`, `probe`.
- Agents and their endpoint: `agent_rollouts`, `session`, `session_record`, `session_server`, `chat_requests`.
- Other libraries: `adapters`.

In the code a rollout with an environment is called an episode, because the controller's `Rollout` is a whole batch.
"""
