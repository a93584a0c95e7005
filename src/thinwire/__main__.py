"""``python -m thinwire``: the command line."""

from thinwire.cli import main

if __name__ == "__main__":
    main()
