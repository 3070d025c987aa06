"""Latent feedback: the previous position's top state, fused with the token embedding, is the next input of the stack."""
