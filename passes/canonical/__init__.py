"""Passes that write a captured graph in one form, and mark its sites."""
