"""A model on a GPU: fused layers and captured graphs."""
