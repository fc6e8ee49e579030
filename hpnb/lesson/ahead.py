"""Imported before the rest of this room: a notebook will want ranks, so their server can import now.

In a kernel the room takes seconds to import (transformers does), and the server needs what it needs.
"""

from hpnb.ranks.forkserver import start_ahead

start_ahead("hpnb.lesson")
