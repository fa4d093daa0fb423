"""The papers' experiments in miniature, and what they say about the papers' claims."""
