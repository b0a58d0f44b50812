"""What a job needs before it takes a GPU: memory, time, and the best way to lay its roles over GPUs.

Pure: nothing here reads files, clocks, the network or the environment, and nothing imports more than the standard
library and the contract. What comes from files, a cluster or the hub is read by `rljob_cli`.

In the order of reading: `model_shape`, `gpus`, `workload` (the words), `constants` (what no formula gives),
`plan_types` (the answers); `job`, `job_placement`, `model_config`, `gguf_shape`, `known_models`, `clusters` (from
what people have to these words); `kv_cache`, `memory`, `timing`, and `plan`, which puts them together; `search` (the
best placement), `advice` (a run beside its plan), `job_memory` (short answers by a job's file alone).
"""
