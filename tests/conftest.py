"""Settings that every test shares: how hypothesis draws its examples.

HOLDFAST_HYPOTHESIS names the profile: `ci` (the default) draws the same examples on every run,
`fresh` draws new ones and prints how to replay a failure.
"""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("fresh", derandomize=False, deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HOLDFAST_HYPOTHESIS", "ci"))
