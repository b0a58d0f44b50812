"""The `rljob` command. It never imports the trainer. Commands that need the trainer start it as a separate process."""
