"""The path of xminigrid's image observations; the code lives in `xland_minigrid.viz.images`."""
