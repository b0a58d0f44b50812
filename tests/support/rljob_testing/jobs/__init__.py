"""A small valid job, and jobs that follow or break each rule of the API."""
