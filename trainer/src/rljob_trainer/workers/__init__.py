"""The roles of a process. `actor.py`, `rollout.py`, `reference.py`, `reward.py`, and `hybrid.py`, which lets actor and
rollout take turns. `columns.py` names what passes between them, `protocols.py` what the controller sees of them."""
