"""kvchat: chat with local language models, and never re-read the same conversation twice.

Importing this package loads nothing heavy; the floors below it are described in README.md.
"""

__version__ = "0.1.0"
