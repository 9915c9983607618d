"""Floor 2: KV memory. Knows blocks, token ids and bytes; knows no layer, template or request."""
