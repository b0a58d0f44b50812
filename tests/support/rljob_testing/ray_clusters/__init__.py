"""Ray clusters on this machine, and workers for them."""
