"""The shipped demo pair: weights, tokenizer and cards as package data. It holds no code."""
