"""Floor 4: conversations, templates, token ledger, session files. Knows text, but no screen."""
