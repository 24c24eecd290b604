"""The wrapped model as transformers and lm-eval know models."""
