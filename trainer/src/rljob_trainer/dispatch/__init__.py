"""The meaning of `@register` on a worker's method, without Ray.

`register.py` is the decorator. `modes.py` has the modes, and `split_gather.py` how each mode splits arguments and
gathers results. `mesh.py` says which rank gets which share of the data. `worker.py` is the base class of workers.
"""
