"""The replicated state machine: the rules of the queue, and the store that keeps their state.

Owns what happens to a message once its entry is committed. Refuses to know clocks, sockets,
randomness and the environment: time arrives inside the entry. Open `machine.py` first.
"""
