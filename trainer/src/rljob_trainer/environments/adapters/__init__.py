"""Environment classes for games and tasks of other libraries. Each file needs only its library, and is used in a job by
its path, for example `rljob_trainer.environments.adapters.gymnasium:Gymnasium`.
"""
