"""The compiled step of a CPU: a decoder read from a model's modules, and its program."""
