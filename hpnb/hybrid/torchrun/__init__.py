"""Processes that torchrun starts, on one node or several: launch_from_torch.py is the entry."""
