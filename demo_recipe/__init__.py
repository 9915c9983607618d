"""The recipe of the demo pair: dialogues, training, scores and card. Not part of the product."""
