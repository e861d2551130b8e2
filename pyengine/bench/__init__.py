"""Benchmarks of the real engine on this machine: what batching gives, and what it costs. No policy is decided here."""
