"""What a run tells about itself. Nothing here knows Ray or torch.

Read `metrics.py` first: the names of all numbers of a step, and how they are put together. `sinks.py` is where they
go (`jsonl.py`, `plots.py`, the console), with `samples.py` for texts. Where time goes: `timing.py` for the phases of a
step, `spans.py` for what every process does, `timeline.py` for the picture of both. Where memory goes: `memory.py`,
`memory_plot.py`, `growth.py`. What is going on right now: `activity.py`, `progress.py`. `log.py` is the log itself.
"""
