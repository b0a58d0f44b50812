"""What a job needs before it takes a GPU: memory, time, and the best way to lay its roles over GPUs.

Pure: nothing here reads files, clocks, the network or the environment, and nothing imports more than the standard
library and the contract. What comes from files, a cluster or the hub is read by `rljob_cli` (`rljob_cli.plan`).

In the order of reading:

1. The words: `model_shape` (how large a model is), `workload` (what a job does in a step), `gpus` and `placement` (on
   what, and where), `constants` (what no formula gives); `memory_types` and `timing_types` are the answers.
2. From what people have to these words: `job` and `job_adapters` (a job file to a workload), `job_placement` (its pools
   to a placement, and back), `model_config`, `gguf_shape` and `known_models` (to a shape; the table is
   `known_model_rows`), `known_gpus` (a name to a GPU), `cluster_text` (`4x8xH100`), `cluster_nodes` (Kubernetes'
   nodes), `cluster_pools` (pools onto nodes).
3. What comes of them: `kv_cache` (weights and cache of a rollout engine, which both of the next two need),
   `memory`, `timing`; `plan` puts the two together.
4. What is made of plans: `search` (the best placement), `calibration` (the fit of constants, of whatever was measured),
   `advice` (a run beside its plan), `job_memory` and `host_memory` (the short answers for the operator and for
   `rljob explain`, by a job's file alone).
"""
