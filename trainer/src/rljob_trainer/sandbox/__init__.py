"""Runs the code of a response in a process that the kernel confines. Rewards of type Code run the tests of a row in it.

In the scoring process, `sandbox.py` starts a zygote and sends it programs; `watching.py` collects what their processes
write, and kills them at the limits of time, output, threads and files.

The zygote (`zygote.py`) is a small process without data of the run. It forks one child for each program, in which
`confinement.py` removes permissions, with `seccomp.py` (the rules are in `system_calls.py`) and `landlock.py`.
`programs.py` then runs the program, and `exchange.py` connects the two processes of an assert statement
(`plain_data.py`). `settings.py` removes all environment variables. These modules import only the standard library and
each other, so that the zygote starts quickly and its memory contains little that a program could read. It also loads
modules that programs often import, such as NumPy.

A program cannot start a process: seccomp allows `clone` only with the flags of a thread, and no other call that creates
a process or executes a file (`fork`, `vfork`, `execve`).
"""
