"""Floor 1: tensor operations on paged KV memory and in a model's layers.

Each has a torch reference and a faster implementation. The package imports nothing from kvchat.
"""
