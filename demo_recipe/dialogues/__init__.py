"""The demo dialogues, one module a skill. Knows what people say; knows no token and no network."""
