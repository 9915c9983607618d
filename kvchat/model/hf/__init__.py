"""Transformers' modules: which class runs a configuration, and how it runs on a paged KV cache."""
