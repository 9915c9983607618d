"""The shipped demo model pair and the recipe that made it. Knows no engine and no terminal."""
