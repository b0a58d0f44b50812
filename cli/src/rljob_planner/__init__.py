"""The planner: how much memory and time a job needs, and the best placement of its roles on the GPUs of a cluster.

The package is pure. It reads no files, clock, network or environment, and imports only the standard library, pydantic
and the contract (`rljob_api`). `rljob_cli` reads files, clusters and the Hugging Face hub.

Read in this order:

- types: `model_shape`, `gpus`, `workload`; `constants` (numbers that no formula gives); `plan_types` (results)
- input: `job_workload`, `job_placement`, `model_config`, `gguf_shape`, `known_models`, `clusters`
- models of memory and time: `kv_cache`, `memory`, `timing`; `plan` combines their results
- `search` finds the best placement; `advice` compares a run with its plan and suggests changes; `job_memory` estimates
  memory from a job's spec alone

Units: memory in bytes (GiB in messages, 1 GiB = 2^30 bytes), time in seconds, lengths in tokens, bandwidths in bytes
per second, speeds in floating-point operations per second (FLOP/s). Sizes of models and tensors are counts of elements.
Unless stated otherwise, memory is that of one GPU: the fullest GPU of its pool.

Letters of formulas:

    B  sequences (a prompt and its response)           T   tokens that one GPU's layers process in a micro-batch
    L  decoder layers                                  H   hidden size
    q  query heads x head size                         kv  key/value heads x head size
    F  width of an MLP (of one expert)                 E   experts of a layer; k of them process a token
    V  vocabulary size                                 P   parameters of the model; P_l: of a layer, P_r: of the root
    W  GPUs that hold one copy in training (shards)    TP  GPUs that hold one copy in the rollout engine
    m  bytes of an element in a train engine's passes  b   bytes of an element in the rollout engine

The root is the part of a model that belongs to no decoder layer: the embedding, the last norm and the output head.
"""
