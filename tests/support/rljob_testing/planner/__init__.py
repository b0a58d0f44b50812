"""Jobs for the tests of the planner, and independent measurements of what it predicts."""
