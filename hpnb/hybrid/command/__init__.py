"""`python -m hpnb train run.toml`: command.py is where to begin."""
