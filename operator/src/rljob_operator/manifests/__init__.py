"""What the operator makes on the API server, as plain objects; pure."""
