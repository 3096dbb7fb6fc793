"""`python -m xland_minigrid` is the command `xland-minigrid`."""
from xland_minigrid.cli import main

raise SystemExit(main())
