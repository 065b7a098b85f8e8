"""Passes that follow the batch, and prove that samples stay apart."""
