"""Where the shipped demo pair lives inside the package."""

from pathlib import Path

HOME = Path(__file__).parent
TARGET = HOME / "target"
DRAFT = HOME / "draft"
MANIFEST = HOME / "manifest.json"
