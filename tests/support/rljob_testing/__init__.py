"""What the tests share: real servers to test against, and builders for programs that have to be built first."""
