"""A real API server, the programs that are built for it, its clients, and the Helm chart."""
