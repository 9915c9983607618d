"""A model on a GPU: fused layers, captured graphs, and the races that choose kernels."""
