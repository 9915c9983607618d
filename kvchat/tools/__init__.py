"""Tools that the chat offers to its model: those built in, and those of MCP servers."""
