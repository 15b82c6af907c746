"""Getting memory back: the savings as data, predicted, recorded, timed and compared."""
