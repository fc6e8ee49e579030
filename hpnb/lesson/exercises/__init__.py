"""The checks behind the exercises, one file a notebook. They run what the reader wrote against an oracle."""
