"""The interactive chat: a live prompt at the bottom, and answers that stream above it."""
