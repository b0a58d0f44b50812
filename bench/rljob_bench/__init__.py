"""What the programs of `bench/` share: rounds of measurements side by side, the machine, tables, and the peer."""
