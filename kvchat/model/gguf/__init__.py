"""Reads GGUF files: header, configuration, tokenizer and tensors, under transformers' names."""
