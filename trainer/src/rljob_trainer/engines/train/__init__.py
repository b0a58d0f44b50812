"""Training and scoring with one sharded model.

Read `engine.py` first: it has everything that workers call. `model.py`, `sharded_model.py` and `weight_loading.py`
build a model, `layout.py` places it on ranks, and `logprob_parity.py` checks its log-probabilities. A forward pass goes
through `token_batch.py` and `micro_batching.py`, `token_model.py` (the model), `attention.py` and
`attention_kernels.py` (attention within rows), `output_head.py`, `token_logprobs.py` and `logit_tiles.py` (from hidden
states to log-probabilities).
"""
