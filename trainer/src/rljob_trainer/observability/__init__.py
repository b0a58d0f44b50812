"""Metrics, samples, timelines, progress and logs of a run. Only `memory.py` and `profiles.py` use torch;
nothing here uses Ray.

Read `metrics.py` first: the names of all metrics, and how they are reduced over workers. `sinks.py` writes them
(`jsonl.py`, TensorBoard), `progress.py` shows them on the terminal, `plots.py` draws them; `samples.py` is for prompts
and responses. Time: `timing.py` for the phases of a step, `spans.py` for what this process does, `timeline.py` for the
file with the spans of all processes, `profiles.py` and `nsys_profiles.py` for those with the operations of one
process. Memory: `memory.py`, `memory_plot.py`. Signs of progress: `activity.py`, `growth.py`. `log.py` formats the log.
"""
