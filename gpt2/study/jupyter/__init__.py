"""Jupyter around the notebooks: what starts it, what runs in it, what is kept of it."""
