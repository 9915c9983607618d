"""CPU kernels that LLVM compiles when a model is loaded, and programs of them."""
