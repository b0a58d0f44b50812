"""Code that the programs of `bench/` share: rounds of measurements, machine data, tables, and peer processes."""
