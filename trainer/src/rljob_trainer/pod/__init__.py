"""Small programs that run next to the trainer in the pods of a cluster: one prints the driver's log, two are stop hooks
that delay the end of a pod until the trainer has saved, one dumps stack traces. They start quickly, because they import
no large library.
"""
