"""Floor 4: conversations, templates, token ledger and session files, without a terminal."""
