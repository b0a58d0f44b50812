"""Training and scoring with one sharded model.

Begin with `engine.py`: all that workers call. A model comes to be in `model.py`, `sharded_model.py` and
`weight_loading.py`, over ranks as `layout.py` says, and is tried by `acceptance.py`. How a pass goes:
`token_batch.py` and `passes.py` (which rows), `token_model.py` (through the model), `attention.py` and
`attention_kernels.py` (rows apart), `output_head.py`, `token_logprobs.py` and `logit_tiles.py` (from hidden states to
log-probabilities).
"""
