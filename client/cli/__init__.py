"""The `holdfast` command: one file a noun, each with its parser and its run function.

Owns arguments, printed output and exit codes. Refuses to know any rule of the queue: it builds
values, hands them on and prints what comes back. Open `main.py` first.
"""
