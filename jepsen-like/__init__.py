"""The harness that tries to break Holdfast and checks its promises.

Owns faults, histories, checkers and a second, naive telling of the rules. Refuses to know how the
rules are implemented: it meets the system as a user does. Open `model/` first.
"""
