"""Passes that put switches at sites, and specialise graphs to a policy."""
