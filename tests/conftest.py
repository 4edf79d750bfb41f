"""What all tests share."""

from __future__ import annotations

import signal

# A suite started in the background inherits an ignored SIGINT, and so would every process it
# starts; the tests that press Ctrl-C need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["service_fixtures", "etcd_fixtures"]
