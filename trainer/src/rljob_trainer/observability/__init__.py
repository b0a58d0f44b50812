"""What a run tells about itself: metrics, timings, samples, plots, log lines. Nothing here knows Ray or torch."""
