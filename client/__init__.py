"""What users install: the language of the queue, the client that speaks it, and the command line.

Owns everything a program needs to talk to a cluster. Refuses to know how a node stores or
replicates: nothing here imports `holdfast.storage` or `holdfast.cluster`, except the command line,
inside the function that needs it. Open `protocol/` first.
"""
