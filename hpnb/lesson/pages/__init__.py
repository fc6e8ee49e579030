"""Commands that run, clean, pair and commit notebooks. No notebook imports them."""
