"""A training program around a boosted model: trainer.py is where to begin."""
