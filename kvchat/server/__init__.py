"""HTTP: other programs use the model and its cache through OpenAI's, Anthropic's and ollama's."""
