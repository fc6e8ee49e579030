"""Checkpoints that belong to the model, not to the layout: checkpoint.py is where to begin."""
