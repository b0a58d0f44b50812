"""`rljob plan`: what a job needs before it takes a GPU."""
