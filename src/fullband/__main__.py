"""`python -m fullband` is the command line."""

from fullband.cli.main import main

if __name__ == "__main__":
    main()
