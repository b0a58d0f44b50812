"""Small programs beside the trainer in the pods of a cluster: one shows the driver's log, two hold up the end of a pod
until the trainer has saved. They start in a moment: they import the standard library, names and settings only.
"""
