"""What `@register` on a worker's method means.

`modes.py` (how arguments are split and results gathered), `mesh.py` (which ranks), `register.py`. No Ray.
"""
