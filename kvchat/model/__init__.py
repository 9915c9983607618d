"""Floor 2: loads checkpoints and runs the forward pass. It is the only user of transformers."""
