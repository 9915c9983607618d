"""Simulation of caches by traces: which blocks of KV each request of a service read."""
