"""The command `rljob plan`: estimates a job's memory and time before it uses a GPU."""
