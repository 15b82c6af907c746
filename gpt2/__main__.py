"""`python -m gpt2 ...`: see `gpt2.cli`."""

import sys

from gpt2.cli import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "pandas"):
            raise
        print(f"error: this Python has no {error.name}; after `make venv` it is .venv/bin/python", file=sys.stderr)
        sys.exit(2)
