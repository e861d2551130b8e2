"""Backends: buffers, streams and the compiled step function of one device, behind one small interface."""
