"""Floor 1: operations on paged KV memory, each with a torch reference and a faster twin.

Knows torch tensors and Triton. Knows nothing of kvchat: no requests, trees or models.
"""
