"""Floor 5: measurements. Every figure beside its ceiling or its peer, measured in the same run."""
