"""Support for the tests of the `rljob` command."""
