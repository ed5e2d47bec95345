"""Decentralized peer-to-peer gossip training for PyTorch."""
