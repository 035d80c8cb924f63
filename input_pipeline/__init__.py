"""Data sets as they are read, tokenised, shuffled and batched."""
