"""Programs that measure and write the tables in `docs/results/`, one command each: `python -m xland_minigrid.measure.NAME --out FILE`.

Nothing else in the package imports this room but the command line.
"""
