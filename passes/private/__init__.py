"""Passes over the joint graph of private training."""
