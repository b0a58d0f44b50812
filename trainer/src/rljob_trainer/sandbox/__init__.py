"""Runs the code of a response in a process that the kernel confines. Tests of rewards of type Code use it.

`sandbox.py` is the scoring process's side: it starts a zygote, gives it programs, and watches time, output, threads and
files. `zygote.py` is a small process without data of the run; it forks one child for each program. `confinement.py`
confines that child, with `seccomp.py` (the system calls in `system_calls.py`) and `landlock.py`. `programs.py` is what
the child then does, and `exchange.py` (with `plain_data.py`) how the two processes of an assert statement exchange
values.

The modules of the zygote (all except `sandbox.py`) import only the standard library, so that it starts quickly and has
little memory that could be read.
"""
