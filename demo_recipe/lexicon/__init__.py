"""Word lists of the demo dialogues, all written for kvchat. Knows words; knows no sentence."""
