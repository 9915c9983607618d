"""Floor 0: plain data every floor shares. Standard library only; knows nothing of the others."""
