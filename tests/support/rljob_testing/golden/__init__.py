"""Numbers that verl computed, and ours beside them."""
