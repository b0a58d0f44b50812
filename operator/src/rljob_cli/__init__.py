"""The `rljob` command. It never imports the trainer: what needs it is started as a process of its own."""
