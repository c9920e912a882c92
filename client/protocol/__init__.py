"""The language both sides speak: values, commands, queries, replies, errors, limits and their bytes.

It imports nothing of ours and does no I/O, so that a client, a node, a checker and a test mean the
same thing by the same name. Open `commands.py` first, then `replies.py`.
"""
