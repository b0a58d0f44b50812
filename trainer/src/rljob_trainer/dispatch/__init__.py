"""The meaning of `@register` on a worker's method, without Ray.

`register.py` is the decorator, `modes.py` says how arguments are split and results gathered, `mesh.py` says which ranks
get which share.
"""
