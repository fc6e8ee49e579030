"""`python -m hpnb train run.toml`: main.py is the entry."""
