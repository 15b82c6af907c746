"""What moves under a reader's hand: the walk, the calculator, the guesses, and their stills."""
