"""The faces a program sees while a GPU is simulated."""
