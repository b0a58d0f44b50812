"""Training and scoring with one sharded model.

Read `engine.py` first: it has everything that workers call; `settings.py` has its settings. `engine_build.py` builds a
model with `model.py`, `sharded_model.py` and `weight_loading.py`; `lora.py` adds adapters, `layout.py` places the model
on ranks, and `logprob_parity.py` checks its log-probabilities.

A forward pass goes through `token_batch.py` and `micro_batching.py` (its input), `token_model.py` (the model),
`attention.py` and `attention_kernels.py` (attention within rows), `output_head.py`, `token_logprobs.py` and
`logit_tiles.py` (from hidden states to log-probabilities). `sequence_parallel.py` shares the tokens of rows among
ranks, `router.py` observes experts. `optimizer.py` is AdamW; `offload.py` and `engine_memory.py` are about memory.
"""
