"""Models that are not ours: what a prediction is tried on."""
