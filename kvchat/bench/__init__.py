"""Floor 5: benchmarks. Each figure is printed beside a ceiling or peer from the same run."""
