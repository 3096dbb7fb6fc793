"""Programs that write the tables in `docs/results/`: `python -m xland_minigrid.measure.NAME --out FILE`.

In the package, only the command line imports this room.
"""
