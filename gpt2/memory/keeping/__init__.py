"""Who keeps a block alive, and what letting go earlier would save."""
