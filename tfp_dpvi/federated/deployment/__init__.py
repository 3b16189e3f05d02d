"""The processes of a study over several machines.

A Flower app carries the messages, each hospital's worker answers them, and a socket links the two.
"""
