"""Code that the programs of proof/ share: `runs` makes missing runs, `curves` reads and draws them, `agent_programs` runs
agents of other packages."""
