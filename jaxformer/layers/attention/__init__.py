"""Attention modules: multi-head, shared-KV, latent, decay, and mixers of your own."""
