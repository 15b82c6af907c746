"""How an operator finds its way to the card: the ear, and the paths PyTorch takes for a CUDA tensor only."""
