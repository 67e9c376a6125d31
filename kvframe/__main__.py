"""Run the command line as ``python -m kvframe``."""

from kvframe.cli import main

if __name__ == "__main__":
    main(prog_name="kvframe")
