"""HTTP: other programs use the model and its cache through OpenAI's and Anthropic's interfaces."""
