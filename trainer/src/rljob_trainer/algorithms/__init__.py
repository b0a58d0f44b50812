"""The learning rules as pure functions on tensors: no Ray, no clock, no randomness, no state."""
