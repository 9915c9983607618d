"""The interactive screen: a live prompt below, answers streaming above it."""
