"""What holds for all tests: Ctrl-C works, also where the tests were started in the background of a shell script."""

from __future__ import annotations

import signal

# Such a shell starts its background jobs with SIGINT ignored, and every process that a test starts inherits that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
