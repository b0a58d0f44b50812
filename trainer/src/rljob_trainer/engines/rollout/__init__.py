"""Generation: `base.py` is the interface, `select.py` chooses."""
