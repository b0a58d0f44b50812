"""Support for tests of the trainer: whole runs, training steps on fixed rollouts, and parts of steps."""
