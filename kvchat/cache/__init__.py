"""Floor 2: the KV cache. It works on blocks, token ids and bytes."""
