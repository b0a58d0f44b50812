"""Training and scoring with one sharded model. Begin with `fsdp2.py`."""
