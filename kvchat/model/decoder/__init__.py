"""One description of a model, read once from its modules, which both devices run."""
