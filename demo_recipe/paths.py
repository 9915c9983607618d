"""Where the shipped demo pair lives in the source tree."""

from kvchat.model.checkpoint.source import demo_directory

TARGET = demo_directory("target")
DRAFT = demo_directory("draft")
HOME = TARGET.parent
MANIFEST = HOME / "manifest.json"
