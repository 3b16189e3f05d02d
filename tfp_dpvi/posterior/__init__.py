"""Computes a calibrated posterior from released values: post-processing at no cost, in NumPy alone."""
