"""A small valid job, and jobs that keep or break each rule of the API."""
