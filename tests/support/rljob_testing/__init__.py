"""Support code that the tests, e2e, bench and proof share: servers to test against, fakes, builders of inputs."""
