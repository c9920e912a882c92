"""One node: agrees on the log with its peers, applies it to storage, and answers clients.

Owns the network, the disk log, the clock and the order in which a node starts and stops. Refuses to know what a command
means: that is decided in `holdfast.storage`. Open `consensus.py` first: it says how a node's turn goes.
"""
