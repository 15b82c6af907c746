"""What kernels and libraries take besides their outputs: one rule per operator, each with its source."""
