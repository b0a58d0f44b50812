"""The part of `rule_examples` about what leaves the device."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.bad_job import Bad

_GRADIENTS, _REFERENCE = "spec.training.model.offload.gradients", "spec.training.model.offload.reference"
_DEFERRED = "spec.roles.actor.deferGradientReduction"
_LORA = {"spec.training.model.lora": {}, "spec.training.algorithm.kl.coefficient": 0.1}
_SHARD_SIZE, _GPUS = "spec.roles.actor.shardSize", "spec.pools[0].gpusPerNode"

GOOD: dict[str, list[Mapping[str, object]]] = {
    "RLJobSpec.offload.reference": [
        {_REFERENCE: True, "spec.training.algorithm.kl.coefficient": 0.1},
        {_REFERENCE: False},
    ],
    "RLJobSpec.offload.referenceOfAdapters": [
        _LORA,
        {**_LORA, _REFERENCE: True, "spec.roles.ref.shardSize": 1},
        {**_LORA, _REFERENCE: True, "spec.pools[1]": {"name": "second"}, "spec.roles.ref.pool": "second"},
    ],
    "RLJobSpec.offload.gradients": [{_GRADIENTS: True}, {_DEFERRED: True}],
    "RLJobSpec.offload.gradientsOfReplicas": [
        {_GRADIENTS: True, _GPUS: 2, _SHARD_SIZE: 2},
        {_GPUS: 2, _SHARD_SIZE: 1},
    ],
}

BAD: dict[str, list[Bad]] = {
    "RLJobSpec.offload.reference": [Bad(_REFERENCE, {_REFERENCE: True})],
    "RLJobSpec.offload.referenceOfAdapters": [
        Bad(_REFERENCE, {**_LORA, _REFERENCE: True}),
        Bad(_REFERENCE, {**_LORA, _REFERENCE: True, "spec.roles.ref.pool": "main"}),
    ],
    "RLJobSpec.offload.gradients": [Bad(_GRADIENTS, {_GRADIENTS: True, _DEFERRED: True})],
    "RLJobSpec.offload.gradientsOfReplicas": [Bad(_GRADIENTS, {_GRADIENTS: True, _GPUS: 2, _SHARD_SIZE: 1})],
}
