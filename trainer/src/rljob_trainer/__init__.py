"""The trainer: one controller process, one worker process per device.

Begin at `__main__`, `controller/controller.py` and `controller/training_step.py`; ARCHITECTURE.md has the map.
"""
