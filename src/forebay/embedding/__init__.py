"""Embeddings of texts, and scores of pairs of texts, by encoders and causal models within a budget."""
