"""Jobs to plan, and oracles for what is planned."""
