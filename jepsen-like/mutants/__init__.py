"""Deliberate defects, each of which the tests must catch.

Owns small, named ways of being wrong, with the rule that each one breaks. Refuses to be reachable
from a running node: nothing outside the tests imports it, and a defect exists only in a copy of the sources.
A defect that survives shows a missing test. Begin with `catalogue.py`.
"""
