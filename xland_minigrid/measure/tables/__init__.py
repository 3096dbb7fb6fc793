"""Programs that write a table in `docs/results/` and nothing else: `python -m xland_minigrid.measure.tables.NAME --out FILE`.

They run in a clone of the repository; the wheel leaves them out.
"""
