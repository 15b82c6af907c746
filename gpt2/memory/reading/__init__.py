"""Somebody else's history, read: the pickle, its beginning, what it does not say, and where everything lies."""
