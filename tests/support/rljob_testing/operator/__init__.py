"""Support for the tests of the operator: the operator as a process, and stand-ins for all services that it calls."""
