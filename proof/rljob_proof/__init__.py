"""Code that programs of proof/ share: `runs` makes missing runs, `curves` reads and draws them, and `agent_programs`
runs agents of other packages."""
