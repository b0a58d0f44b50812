"""Small programs that run next to the trainer in the pods of a cluster: one prints the driver's log, two are stop hooks
that delay the end of a pod until the trainer has saved, one dumps stacks. They start quickly, because they import only
the standard library, names and settings.
"""
