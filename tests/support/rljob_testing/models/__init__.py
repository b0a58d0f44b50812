"""Small models with random weights, and small engines for them."""
