"""Floor 2: weights and the forward pass. Knows transformers; knows no radix tree and no request."""
