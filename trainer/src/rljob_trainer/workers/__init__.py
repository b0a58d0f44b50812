"""The roles in a worker process: `actor.py`, `critic.py`, `reference.py`, `rollout.py`, `reward.py`, `reward_model.py`,
and `hybrid.py`, which lets actor and rollout take turns on a device.

`columns.py` names the columns of the batches that roles and controller exchange; `protocols.py` has the methods that
the controller calls."""
