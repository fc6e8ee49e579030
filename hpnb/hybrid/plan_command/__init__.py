"""`python -m hpnb plan MODEL --gpus 64 --gpu h100`: main.py is the entry."""
