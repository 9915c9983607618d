"""Floor 6: the command line. Joins settings, model, engine and screen; nobody imports it."""
