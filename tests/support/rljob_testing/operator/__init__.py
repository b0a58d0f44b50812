"""The operator, and stand-ins for all that it talks to."""
