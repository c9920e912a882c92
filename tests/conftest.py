"""Settings that every test shares: how hypothesis draws its examples, and that Ctrl-C is heard.

HOLDFAST_HYPOTHESIS names the profile: `ci` (the default) draws the same examples on every run,
`fresh` draws new ones and prints how to replay a failure.
"""

import os
import signal

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("fresh", derandomize=False, deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HOLDFAST_HYPOTHESIS", "ci"))

# A shell starts what runs in the background with SIGINT ignored, and whatever that starts ignores it too.
signal.signal(signal.SIGINT, signal.default_int_handler)
