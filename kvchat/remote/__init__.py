"""Other programs' servers as engines: what they are, what they are sent, and what they answer."""
