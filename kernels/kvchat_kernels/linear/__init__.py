"""Linear layers whose weights are blocks of 8 or 4 bits: layout, plain form and CPU kernels."""
