"""Before any test: programs that the tests start can be interrupted, also where make itself runs unattended.

A shell starts a job in the background with SIGINT ignored, and whoever that job starts inherits it.
"""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
