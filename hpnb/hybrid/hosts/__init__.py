"""Processes that torchrun starts, on one host or several: launch.py is where to begin."""
