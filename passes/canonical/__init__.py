"""Passes that bring a captured graph into canonical form, and mark its sites."""
