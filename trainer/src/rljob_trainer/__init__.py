"""The trainer: one controller process, one worker process per device.

Begin at `__main__`, `controller/controller.py` and `controller/training_step.py`; ARCHITECTURE.md has the map.

A tensor's name ends with its shape, one letter per dimension: `logprobs_N`, `hidden_MD`. The letters mean the same in
the whole trainer; a module that needs more letters lists them in its docstring.

B responses (rows); N response tokens of all rows; L tokens of all rows, prompts and responses; M tokens that the model
reads; T tokens of the longest row; V vocabulary; D hidden size; G groups (all responses to one prompt are one group); 1
a dimension of size one.
"""
