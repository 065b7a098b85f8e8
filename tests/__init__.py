"""Tests: one folder for each package of the product, one file for each module; helpers in support."""
