"""Generation of responses.

`base.py` is the interface of rollout engines; `vllm_engine.py` and `hf_engine.py` (transformers) implement it;
`select.py` chooses a job's engine; `response_text.py` decodes finished responses for both. `vllm_start.py` starts vLLM
and has its settings; `vllm_weights.py` replaces its weights."""
