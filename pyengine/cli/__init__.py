"""The command line `pyengine`: generate, chat and info. It parses, shows and reports; the engine does the work."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit. Everything is imported in here, so that `import pyengine` stays light."""
    import sys

    from pyengine.cli.process import INTERRUPTED, use_utf8

    use_utf8()
    try:
        from pyengine.cli.app import app

        app(prog_name="pyengine")
    except KeyboardInterrupt:  # before a command had begun
        sys.exit(INTERRUPTED)
