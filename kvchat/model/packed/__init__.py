"""Weights in 8 or 4 bits: formats of files, rounding, and products with them."""
