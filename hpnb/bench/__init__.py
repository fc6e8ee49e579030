"""hpnb against PyTorch's own programs, in one run: `python -m hpnb.bench`. Ratios, never bare times."""
