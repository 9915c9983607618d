"""Floor 0: plain data that all other packages share. Imports the standard library only."""
