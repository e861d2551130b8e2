"""Simulation: the real scheduler under a virtual clock, with a step-time model for the device. It runs no model."""
