"""Floor 6: the command line. Joins settings, model, engine and terminal; no package imports it."""
