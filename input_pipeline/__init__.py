"""Reads, tokenises, shuffles, augments and batches the training and test data."""
