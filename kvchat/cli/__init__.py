"""Floor 6: the command line. The only place that chooses concrete classes; nobody imports it."""
