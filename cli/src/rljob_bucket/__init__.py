"""Files in a bucket of S3 or of a store with the same API. Used by the trainer and by the command line."""
