"""Run the command line as ``python -m kvframe``, or as ``kvframe``."""

import sys


def run() -> None:
    """Run the command line of this process; Ctrl-C ends it in silence while the command line itself is loaded."""
    try:
        from kvframe.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main(prog_name="kvframe")


if __name__ == "__main__":
    run()
