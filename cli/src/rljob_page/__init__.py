"""The page of a run: one HTML file made from the files of the run folder."""
