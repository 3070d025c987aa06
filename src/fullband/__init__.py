"""Latent feedback for language models."""
