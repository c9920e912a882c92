"""The rules a second time, naive: one object a message, no ranges, no indexes, no store.

Owns the answer that tests and checkers compare with. Refuses to know `holdfast.storage`: sharing
code with what it judges would share its mistakes. Read it beside the numbered rules.
"""
