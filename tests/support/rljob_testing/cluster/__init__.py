"""A real API server, what is built and installed for it, and its clients."""
