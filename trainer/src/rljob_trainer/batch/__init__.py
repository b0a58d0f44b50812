"""The batches that controller and workers exchange.

Read `proto.py` first (`DataProto`, a batch), then the kinds of its columns: `columns.py` (tensors and objects),
`ragged.py` (rows of different lengths) and `remote.py` (stored in an object store).
"""
