"""The command line `pyengine` and its commands. It parses, shows and reports; the engine does the work."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit. Everything is imported in here, so that `import pyengine` stays light."""
    import signal

    # While modules are imported Ctrl-C ends the process at once: an import that is interrupted by an exception shows a
    # traceback or, inside of a callback, loses it. `take_interrupts` ends this state. An ignored signal stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from pyengine.cli.process import exit_of, use_utf8

    use_utf8()
    from pyengine.cli.app import app

    exit_of(lambda: app(prog_name="pyengine"))
