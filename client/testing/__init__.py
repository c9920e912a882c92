"""holdfast.client.testing: a real broker inside a test, and its clock in the test's hand. Not for production.

Open `broker.py` first; `fixtures.py` is the same for pytest, and the only file that imports it.
"""
