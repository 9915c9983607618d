"""Reads the files of a checkpoint, of a LoRA adapter and of the hub's cache. Knows no model."""
