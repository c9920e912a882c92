"""A whole cluster in one thread: the real consensus and journal over a seeded network, disks, clocks and faults.

Owns simulated time and everything that can fail in it, and the checks on what the nodes then did. Refuses to know
the real clock, a thread, a socket or a file: one seed is one run, byte for byte. Open `cluster.py` first.
"""
