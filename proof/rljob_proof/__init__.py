"""What the programs of proof/ share: `runs` makes runs that are not there yet, `curves` reads and draws them."""
