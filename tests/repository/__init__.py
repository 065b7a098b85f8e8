"""Tests of the repository itself: documents, examples, packaging, layout."""
