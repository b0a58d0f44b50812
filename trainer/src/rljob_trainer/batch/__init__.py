"""What travels between the controller and the workers.

Begin with `proto.py` (`DataProto`, a batch), then the kinds of its columns: `columns.py` (plain), `ragged.py` (rows
of different lengths), `remote.py` (left in an object store).
"""
